"""Owns where plug-ins lie: the folders of each kind, the names that may be declared, the file of a plug-in.

Knows nothing of what the files hold.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from kerneldecl.diagnostics.messages import unknown
from kerneldecl.errors import DeclarationError, Problem

Kind = Literal["rules", "policies", "templates", "archs"]

HOST = "host"
"""The arch that is detected instead of read from a file."""

PACKAGE = Path(__file__).parent.parent
"""The folder of kerneldecl itself, which holds the standard plug-ins."""
STANDARD = PACKAGE
"""A root that has the standard plug-ins alone."""
SINGULAR: Mapping[Kind, str] = {"rules": "rule", "policies": "policy", "templates": "template", "archs": "arch"}


def plugin_folders(kind: Kind, root: Path) -> tuple[Path, ...]:
    """Return where plug-ins of a kind are looked for, in order: the workspace's folder, which need not exist, and the standard one."""
    own, (standard, which) = root / kind, _standard_folder(PACKAGE, kind)
    return (own,) if _which(own) == which else (own, standard)


@functools.cache
def _standard_folder(package: Path, kind: Kind) -> tuple[Path, tuple[int, int] | None]:
    """Return the folder of the standard plug-ins of a kind, and which it is."""
    standard = package / kind
    if kind == "rules" and not standard.is_dir():
        standard = package.parent / kind  # a checkout: only the wheel has them inside the package
    return standard, _which(standard)


def _which(folder: Path) -> tuple[int, int] | None:
    """Return what two paths of one folder have in common; None where there is none. Resolving paths looks at each folder above."""
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def plugin_names(kind: Kind, root: Path) -> tuple[str, ...]:
    """Return the names that may be declared, sorted."""
    suffix = _suffix(kind)
    files = (file for folder in plugin_folders(kind, root) for file in _listed(folder))
    stems = {file.removesuffix(suffix) for file in files if file.endswith(suffix) and not file.startswith("_")}
    stems = {stem for stem in stems if stem and (suffix == ".toml" or stem.isidentifier())}
    return tuple(sorted(stems | {HOST} if kind == "archs" else stems))


def _listed(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder) if entry.is_file()]
    except OSError:  # there is none, or it may not be read
        return []


def plugin_file(kind: Kind, root: Path, name: str) -> Path:
    """Return the file of a plug-in; raise DeclarationError where there is none. The arch `host` has no file."""
    files = _files(kind, root, name)
    if not files or name.startswith("_"):
        sentence, hint = unknown(SINGULAR[kind], name, plugin_names(kind, root))
        raise DeclarationError([Problem(f"{kind}/{name}{_suffix(kind)}", sentence, hint)])
    return files[0]


def is_own(kind: Kind, root: Path, name: str) -> bool:
    """Say whether a plug-in's file is the user's; raise DeclarationError where there is none."""
    return plugin_file(kind, root, name).parent.resolve() != plugin_folders(kind, STANDARD)[-1].resolve()


def shadowed_file(kind: Kind, root: Path, name: str) -> Path | None:
    """Return the standard file that a workspace's file of the same name replaces."""
    return next(iter(_files(kind, root, name)[1:]), None)


def displayed(file: Path, root: Path) -> str:
    """Return a file's path as messages show it: relative to the workspace where it lies inside."""
    resolved, base = file.resolve(), root.resolve()
    return str(resolved.relative_to(base)) if resolved.is_relative_to(base) else str(file)


def shown_in(root: Path, file: Path) -> str:
    """Return a file's path as reports name it: relative to the workspace where it lies inside, else to where kerneldecl lies."""
    base = next((base for base in (root, PACKAGE.parent) if file.is_relative_to(base)), None)
    return str(file.relative_to(base) if base else file)


def _files(kind: Kind, root: Path, name: str) -> tuple[Path, ...]:
    files = (os.path.join(folder, f"{name}{_suffix(kind)}") for folder in plugin_folders(kind, root))
    return tuple(Path(file) for file in files if os.path.isfile(file))


def _suffix(kind: Kind) -> str:
    return ".toml" if kind == "archs" else ".py"
