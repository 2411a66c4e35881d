"""Owns published.toml: which artifacts of a workspace were published, under which version, with which content. To be committed.

Knows nothing of registries. A version that was published stands for its content: nothing else is built under it, unless that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli

from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.store.files import write_whole
from kerneldecl.store.regular import read_file

FILE = "published.toml"
_HEAD = "# Written by `kerneldecl push`: what was published under each version. Commit it; do not edit it.\n"
_FIELDS = ("name", "version", "target", "model", "key", "reference")


def read(root: Path) -> list[dict[str, str]]:
    """Return what was published; raise DeclarationError where the file cannot be read."""
    try:
        listed = tomli.loads(read_file(root / FILE).decode()).get("published", [])
        return [{name: str(each[name]) for name in _FIELDS} for each in listed]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DeclarationError([Problem(FILE, "cannot be read", "take it from git, or remove it to forget what was published")]) from None


def note(root: Path, manifest: Mapping[str, Any], reference: str) -> None:
    """Note that an artifact is published, in place of what was noted of this version for this target and device."""
    fresh = {**_identity(manifest), "key": manifest["key"], "reference": reference}
    kept = [each for each in read(root) if any(each[name] != fresh[name] for name in ("name", "version", "target", "model"))]
    listed = sorted([*kept, fresh], key=lambda each: [each[name] for name in _FIELDS])
    blocks = ["[[published]]\n" + "".join(f"{name} = {json.dumps(each[name])}\n" for name in _FIELDS) for each in listed]
    write_whole(root / FILE, "\n".join([_HEAD, *blocks]), durable=False)


def published_as(root: Path, manifest: Mapping[str, Any]) -> str:
    """Return where other content than this is published under its version; empty where none is."""
    said = _identity(manifest)
    same = (each for each in read(root) if all(each[name] == value for name, value in said.items()))
    return next((each["reference"] for each in same if each["key"] != manifest["key"]), "")


def _identity(manifest: Mapping[str, Any]) -> dict[str, str]:
    return {"model": manifest["arch"]["model"], **{name: manifest[name] for name in ("name", "version", "target")}}
