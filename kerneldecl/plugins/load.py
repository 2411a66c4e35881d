"""Owns the loading of plug-ins as Python modules and archs, and the blame for failures: file and line of the plug-in.

Knows nothing of what is declared with them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.model import SPECIALIZE, Arch
from kerneldecl.plugins.check import why_not_rule
from kerneldecl.plugins.digest import specialize_files
from kerneldecl.plugins.find import HOST, PACKAGE, SINGULAR, STANDARD, Kind, displayed, plugin_file, plugin_folders
from kerneldecl.plugins.guard import guarded
from kerneldecl.rule import Rule
from kerneldecl.store.regular import read_file

_SYNTHETIC = "_kerneldecl_"
_SYNTHETIC_NAME = re.compile(rf"{_SYNTHETIC}([a-z]+)_[0-9a-f]{{16}}")


def load_rule(root: Path, name: str) -> type[Rule]:
    """Return the class that `rules/<name>.py` declares; raise DeclarationError where there is none."""
    file = plugin_file("rules", root, name)
    module = _imported("rules", root, name)
    class_name = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    rule = getattr(module, class_name, None)
    sentence = why_not_rule(rule, name, class_name)
    if sentence:
        raise DeclarationError([Problem(displayed(file, root), sentence)])
    assert isinstance(rule, type)
    return rule


def load_module(kind: Kind, root: Path, name: str) -> ModuleType:
    """Return the module of a plug-in; raise DeclarationError where its file is missing or fails to import."""
    file = plugin_file(kind, root, name)
    if file.parent == PACKAGE / kind:
        return importlib.import_module(f"{PACKAGE.name}.{kind}.{name}")
    return _imported(kind, root, name)


def custom_kernels(root: Path, path: str, mod: Any, arch: Arch) -> list[Any]:
    """Return the kernels that an entry's `specialize` file makes of a module; raise DeclarationError where the file fails."""
    file = root / path
    package = _package_of(SPECIALIZE, (file.parent,), map(str, specialize_files(root, path)))
    with blamed(file, root, f"{file.name} fails to import"), _no_bytecode():
        module = importlib.import_module(f"{package}.{file.stem}")
    with blamed(file, root, "specialize() fails"):
        found = module.specialize(mod, arch)
        several = list(found) if isinstance(found, Iterator | list | tuple) else [found]
        return [each for each in several if each is not None]


@contextlib.contextmanager
def blamed(file: Path, root: Path, doing: str) -> Iterator[None]:
    """Turn any error of a plug-in's code into a DeclarationError with its file and line."""
    try:
        with contextlib.nullcontext() if _is_standard(file) else guarded():
            yield
    except DeclarationError:
        raise
    except (Exception, SystemExit) as error:
        place, line = _place(error, file)
        message = _SYNTHETIC_NAME.sub(r"\1", error.msg if isinstance(error, SyntaxError) else str(error))
        sentence = f"{doing}: {type(error).__name__}: {message}" if message else f"{doing}: {type(error).__name__}"
        raise DeclarationError([Problem(displayed(place, root), " ".join(sentence.split()), line=line)]) from error


@functools.cache
def _is_standard(file: Path) -> bool:
    """Say whether a file is a standard plug-in: those are trusted, and checked ten thousand times in large workspaces."""
    return file.parent in {folder for kind in SINGULAR for folder in plugin_folders(kind, STANDARD)[-1:]}


def _place(error: BaseException, file: Path) -> tuple[Path, int]:
    """Return the innermost line of the plug-in's file or of its neighbours, in its folder and the folders in that."""
    frames = [(Path(frame.filename), frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((Path(error.filename), error.lineno or 0))
    own = (frame for frame in reversed(frames) if file.parent in frame[0].parents[:2])
    return next(own, (file, 0))


def _imported(kind: Kind, root: Path, name: str) -> ModuleType:
    """Import a file through Python's own import system, as a module of one synthetic package made of the kind's folders."""
    with blamed(plugin_file(kind, root, name), root, f"{SINGULAR[kind]} {name} fails to import"), _no_bytecode():
        return importlib.import_module(f"{_package(kind, root)}.{name}")


def _package(kind: Kind, root: Path) -> str:
    """Return the name of the package whose modules are the files of a kind; edited files make another package."""
    folders = plugin_folders(kind, root)
    standard = b"".join(map(_standard_content, folders[1:]))
    return _package_of(kind, folders, _python_files(folders[0]), standard)


@functools.cache
def _standard_content(folder: Path) -> bytes:
    """Return a digest of the standard plug-ins beside a workspace's own. A process reads them once: it keeps their modules, too."""
    return _content(_python_files(folder))


def _python_files(folder: Path) -> list[str]:
    return [
        os.path.join(above, name) for above, _, names in os.walk(folder) for name in names if name.endswith(".py") and _is_file(above, name)
    ]


def _is_file(folder: str, name: str) -> bool:
    """Say whether a name is a file's, and no pipe's or of a link that leads nowhere: none of these is ever imported."""
    return os.path.isfile(os.path.join(folder, name))


def _content(files: Iterable[str]) -> bytes:
    content = hashlib.sha256()
    for file in sorted(files):
        content.update(os.fsencode(f"\n{file}\n") + read_file(file))
    return content.digest()


def _package_of(kind: str, folders: tuple[Path, ...], files: Iterable[str], beside: bytes = b"") -> str:
    where = repr(tuple(folder.resolve() for folder in folders)).encode()
    name = f"{_SYNTHETIC}{kind}_{hashlib.sha256(where + _content(files) + beside).hexdigest()[:16]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder) for folder in folders]
        _forget_listings(folders)
        sys.modules[name] = package
    return name


def _forget_listings(folders: Iterable[Path]) -> None:
    """Have Python list these folders and those below them again: else a file written within the clock's resolution is not seen.

    `importlib.invalidate_caches` would have it list all of site-packages, too.
    """
    for folder in map(str, folders):
        for path, finder in list(sys.path_importer_cache.items()):
            if path == folder or path.startswith(f"{folder}{os.sep}"):
                if finder is None:  # there was no such folder
                    del sys.path_importer_cache[path]
                elif hasattr(finder, "invalidate_caches"):
                    finder.invalidate_caches()


@contextlib.contextmanager
def _no_bytecode() -> Iterator[None]:
    # A check must write nothing, and Python compares the time of bytecode in whole seconds.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def kind_of(root: Path, name: str) -> str:
    """Return the kind of an arch, `cpu` or `cuda`, without looking at this machine; raise DeclarationError for a wrong file."""
    return "cpu" if name == HOST else load_arch(root, name).kind


def load_arch(root: Path, name: str) -> Arch:
    """Return the arch that `archs/<name>.toml` describes, or the detected one for `host`; raise DeclarationError for a wrong file."""
    if name == HOST:
        from kerneldecl.hardware.host import detect

        return detect()
    from kerneldecl.hardware.arch_file import read_arch

    file = plugin_file("archs", root, name)
    return read_arch(name, read_file(file), displayed(file, root))
