"""Owns what a tune record says of candidates that replaced others which cannot be built, and whether that still holds.

Knows nothing of searches. A tune key holds the list of `top_k` candidates. What replaces some of them is known once those have failed, so
the record names what it depends on, and a plan compares that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kerneldecl.errors import DeclarationError
from kerneldecl.model import Candidate

BEYOND = "beyond"
"""Field of a tune record: key of the list that was gone beyond, and digests of the templates that replacements name."""

OUTDATED = "candidates that cannot be built were replaced, and their policy, what it is asked or a template has changed"


def beyond(propose_key: str, replacements: Iterable[Candidate], template: Callable[[str], str]) -> dict[str, Any]:
    """Return what the choice of replacements depends on besides the tune key."""
    names = sorted({candidate.template for candidate in replacements})
    return {"propose": propose_key, "templates": {name: template(name) for name in names}}


def why_outdated(result: Mapping[str, Any], propose_key: str, template: Callable[[str], str]) -> str:
    """Return why replacements may be others now, as a sentence; empty where there are none, or they are the same."""
    recorded = result.get(BEYOND)
    return "" if recorded is None or recorded == _now(recorded, propose_key, template) else OUTDATED


def _now(recorded: object, propose_key: str, template: Callable[[str], str]) -> dict[str, Any] | None:
    """Return what a record would say now; None where a template is gone, or the field is none that was written here."""
    templates = recorded.get("templates") if isinstance(recorded, dict) else None
    if not isinstance(templates, dict) or not all(isinstance(name, str) and name.isidentifier() for name in templates):
        return None
    try:
        return {"propose": propose_key, "templates": {name: template(name) for name in templates}}
    except DeclarationError:
        return None
