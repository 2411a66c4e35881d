"""Owns the files behind a plug-in, found through its imports, and the digest of what they mean.

Knows nothing of loading: imports are read from the text, and nothing is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kerneldecl.plugins.find import PACKAGE, SINGULAR, Kind, plugin_file, plugin_folders
from kerneldecl.plugins.meaning import meaning, meaning_without
from kerneldecl.store.keys import digest
from kerneldecl.store.regular import read_file
from kerneldecl.toolchain import companions

Folders = tuple[Path, ...]


class Told(NamedTuple):
    """What a Python file means."""

    digest: str
    imports: tuple[tuple[str, int], ...]
    without: dict[str, str]
    """Its digest without the methods of some names, by these names; with all of it under the empty text."""


@dataclass
class Reading:
    """What has been read of plug-ins' files, kept from one plug-in to the next while nothing changes: each file is read once."""

    imports: dict[tuple[Path, Folders], frozenset[Path]] = field(default_factory=dict)
    """The files that a file imports, as seen from a kind's folders."""
    modules: dict[tuple[str, Folders], tuple[Path, ...]] = field(default_factory=dict)
    """The files of a module that is looked for in folders."""
    keys: dict[Path, str] = field(default_factory=dict)
    """The digest of each file's bytes."""
    known: dict[str, Told] = field(default_factory=dict)
    """What Python files mean, by the digest of their bytes: also what an earlier process has found."""
    used: set[str] = field(default_factory=set)
    """The digests of the bytes of what was read."""
    has_learned: bool = False
    """Whether anything in `known` is new."""
    paths: dict[tuple[Path, Path], str] = field(default_factory=dict)
    """The name in digests of a file, by it and the workspace."""

    def told(self, file: Path, without: frozenset[str] = frozenset()) -> Told:
        """Return what a Python file means, with its digest without methods of these names."""
        wanted = " ".join(sorted(without))
        found = self.known.get(self.keys[file]) if file in self.keys else None
        if found is None or wanted not in found.without:
            content = read_file(file)
            key = self.keys[file] = digest(content)
            self.used.add(key)
            if key not in self.known or wanted not in self.known[key].without:
                self._learn(key, content, without)
            found = self.known[key]
        return found

    def _learn(self, key: str, content: bytes, without: frozenset[str]) -> None:
        whole = meaning(content)
        earlier = self.known[key].without if key in self.known else {}
        own = meaning_without(content, without) if without else whole.digest
        self.known[key] = Told(whole.digest, whole.imports, {**earlier, " ".join(sorted(without)): own})
        self.has_learned = True

    def digest(self, file: Path, without: frozenset[str]) -> str:
        """Return the digest of a file: of what it means where it is Python or C++, without methods of these names, else of its bytes."""
        if file.suffix == ".py":
            return self.told(file, without).without[" ".join(sorted(without))]
        if file not in self.keys:
            content = read_file(file)
            self.keys[file] = digest(companions.meant(content) if file.suffix in _CPP else content)
        return self.keys[file]

    def path(self, file: Path, root: Path) -> str:
        if (file, root) not in self.paths:
            self.paths[file, root] = path_in_digests(file, root)
        return self.paths[file, root]


_CHANGES_NOTHING = (
    *("artifact", "diagnostics", "errors", "hardware", "model", "rows", "plugins"),
    *("serial", "signature", "store", "toolchain"),
)
"""Rooms of the package that are not followed: values, messages and doors to the machine, which choose nothing."""
_COMPANIONS = "toolchain.companions."
_CPP = frozenset({".cpp", ".h"})


def plugin_files(kind: Kind, root: Path, name: str, seen: Reading | None = None) -> tuple[Path, ...]:
    """Return a plug-in's file and all that it imports, transitively: its own first, the rest sorted.

    `seen` is what was read before. Followed are imports from the kind's folders, from the workspace, and of kerneldecl itself where they
    can change an outcome; the name of a function that calls a vendor's library is followed to its C++ sources.
    """
    return _with_imports(plugin_file(kind, root, name), plugin_folders(kind, root), root, seen or Reading())


def specialize_files(root: Path, path: str) -> tuple[Path, ...]:
    """Return the file that an entry's `specialize` names and all that it imports from its folder and the workspace, as `plugin_files`."""
    return _with_imports(root / path, ((root / path).parent,), root, Reading())


def path_in_digests(file: Path, root: Path) -> str:
    """Return the name of a file in digests: its path below its kind's folder, below the package, or below the workspace."""
    for kind in SINGULAR:
        for folder in plugin_folders(kind, root):
            if (name := str(file)).startswith(f"{folder}{os.sep}"):
                return f"{kind}/{name[len(str(folder)) + 1 :]}"
    if file.is_relative_to(PACKAGE):
        return str(file.relative_to(PACKAGE))
    return str(file.relative_to(root))


def files_digest(root: Path, files: Iterable[Path], without: frozenset[str] = frozenset(), seen: Reading | None = None) -> str:
    """Return one digest of what several files mean, each under its `path_in_digests`; where the root lies plays no part.

    Methods of the names in `without` are left out.
    """
    reading = seen or Reading()
    return _joint_digest(((reading.path(file, root), file) for file in files), without, reading)


def specialize_digest(root: Path, files: Sequence[Path]) -> str:
    """Return one digest of `specialize_files`; where the first one's folder lies in the workspace plays no part."""
    folder = files[0].parent
    below = [file.is_relative_to(folder) and folder != root for file in files]
    paths = [
        str(file.relative_to(folder)) if is_below else path_in_digests(file, root) for file, is_below in zip(files, below, strict=True)
    ]
    return _joint_digest(zip(paths, files, strict=True), frozenset(), Reading())


def _joint_digest(files: Iterable[tuple[str, Path]], without: frozenset[str], reading: Reading) -> str:
    contents = sorted((path, reading.digest(file, without)) for path, file in files)
    return digest("".join(f"{path} {content}\n" for path, content in contents).encode())


def _with_imports(first: Path, folders: Folders, root: Path, seen: Reading) -> tuple[Path, ...]:
    found, waiting = {first}, [first] if first.suffix == ".py" else []
    while waiting:
        file = waiting.pop()
        if (file, folders) not in seen.imports:
            seen.imports[file, folders] = frozenset(_imported_files(file, folders, root, seen))
        imported = seen.imports[file, folders] - found
        found |= imported
        waiting += sorted(each for each in imported if each.suffix == ".py")
    return (first, *sorted(found - {first}))


def _imported_files(file: Path, folders: Folders, root: Path, seen: Reading) -> Iterator[Path]:
    """Yield the files that a file's import statements resolve to."""
    for module, level in seen.told(file).imports:
        if level:
            yield from _resolved(_absolute(module, level, file, folders), folders, seen)
        else:
            yield from _module_files(module, folders, root, seen)


def _absolute(module: str, level: int, file: Path, folders: Folders) -> str:
    """Return a relative import's module as seen from the folder that the importing file lies below."""
    base = next((file.relative_to(folder).parent.parts for folder in folders if file.is_relative_to(folder)), ())
    return ".".join((*base[: len(base) - level + 1], module))


def _module_files(module: str, folders: Folders, root: Path, seen: Reading) -> Iterable[Path]:
    """Return the files of an absolute import: in the workspace, or of kerneldecl those that can change an outcome."""
    package, _, rest = module.partition(".")
    if package == PACKAGE.name and rest.startswith(_COMPANIONS):
        return companions.files_behind(getattr(companions, rest.removeprefix(_COMPANIONS), None))
    if package == PACKAGE.name:
        return _resolved(rest, (PACKAGE,), seen) if rest and rest.partition(".")[0] not in _CHANGES_NOTHING else ()
    return _resolved(module, (*folders, root), seen)


def _resolved(module: str, folders: Folders, seen: Reading) -> tuple[Path, ...]:
    """Return the file of a module, and of each package above it, from the first folder that has it."""
    if (module, folders) not in seen.modules:
        above, dot, _ = module.rpartition(".")
        path = module.replace(".", "/")
        files = (os.path.join(folder, file) for folder in folders for file in (f"{path}/__init__.py", f"{path}.py"))
        own = next(filter(os.path.isfile, files), None)
        seen.modules[module, folders] = (*(_resolved(above, folders, seen) if dot else ()), *([Path(own)] if own else ()))
    return seen.modules[module, folders]
