"""Owns the files behind a plug-in, found through its imports, and the digest of what they mean.

Knows nothing of loading: imports are read from the text, and nothing is run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kerneldecl.plugins.find import PACKAGE, SINGULAR, Kind, plugin_file, plugin_folders
from kerneldecl.plugins.meaning import meaning, meaning_without
from kerneldecl.store.keys import digest

Imports = dict[Path, frozenset[Path]]
"""The files that each file imports."""
_CHANGES_NOTHING = ("artifact", "diagnostics", "errors", "hardware", "model", "rows", "plugins", "serial", "store", "toolchain")
"""Rooms of the package that are not followed: values, messages and doors to the machine, which choose nothing."""


def plugin_files(kind: Kind, root: Path, name: str, seen: Imports | None = None) -> tuple[Path, ...]:
    """Return a plug-in's file and all that it imports, transitively: its own first, the rest sorted.

    `seen` keeps what files import from one plug-in of a kind to the next, while nothing changes.
    Followed are imports from the kind's folders, from the workspace, and of kerneldecl itself where they can change an outcome.
    """
    return _with_imports(plugin_file(kind, root, name), plugin_folders(kind, root), root, {} if seen is None else seen)


def specialize_files(root: Path, path: str) -> tuple[Path, ...]:
    """Return the file that an entry's `specialize` names and all that it imports from its folder and the workspace, as `plugin_files`."""
    return _with_imports(root / path, ((root / path).parent,), root, {})


def path_in_digests(file: Path, root: Path) -> str:
    """Return the name of a file in digests: its path below its kind's folder, below the package, or below the workspace."""
    for kind in SINGULAR:
        for folder in plugin_folders(kind, root):
            if file.is_relative_to(folder):
                return f"{kind}/{file.relative_to(folder)}"
    if file.is_relative_to(PACKAGE):
        return str(file.relative_to(PACKAGE))
    return str(file.relative_to(root))


def files_digest(root: Path, files: Iterable[Path], without: frozenset[str] = frozenset()) -> str:
    """Return one digest of what several files mean, each under its `path_in_digests`; where the root lies plays no part.

    Methods of the names in `without` are left out.
    """
    return _joint_digest(((path_in_digests(file, root), file) for file in files), without)


def specialize_digest(root: Path, files: Sequence[Path]) -> str:
    """Return one digest of `specialize_files`; where the first one's folder lies in the workspace plays no part."""
    folder = files[0].parent
    below = [file.is_relative_to(folder) and folder != root for file in files]
    paths = [
        str(file.relative_to(folder)) if is_below else path_in_digests(file, root) for file, is_below in zip(files, below, strict=True)
    ]
    return _joint_digest(zip(paths, files, strict=True))


def _file_digest(file: Path, without: frozenset[str]) -> str:
    """Return the digest of a file: of what it means where it is Python, else of its bytes."""
    content = file.read_bytes()
    if file.suffix != ".py":
        return digest(content)
    return meaning_without(content, without) if without else meaning(content).digest


def _joint_digest(files: Iterable[tuple[str, Path]], without: frozenset[str] = frozenset()) -> str:
    contents = sorted((path, _file_digest(file, without)) for path, file in files)
    return digest("".join(f"{path} {content}\n" for path, content in contents).encode())


def _with_imports(first: Path, folders: tuple[Path, ...], root: Path, seen: Imports) -> tuple[Path, ...]:
    found, waiting = {first}, [first] if first.suffix == ".py" else []
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen[file] = frozenset(_imported_files(file, folders, root))
        imported = seen[file] - found
        found |= imported
        waiting += sorted(imported)
    return (first, *sorted(found - {first}))


def _imported_files(file: Path, folders: tuple[Path, ...], root: Path) -> Iterator[Path]:
    """Yield the files that a file's import statements resolve to."""
    for module, level in meaning(file.read_bytes()).imports:
        yield from _resolved(_absolute(module, level, file, folders), folders) if level else _module_files(module, folders, root)


def _absolute(module: str, level: int, file: Path, folders: tuple[Path, ...]) -> str:
    """Return a relative import's module as seen from the folder that the importing file lies below."""
    base = next((file.relative_to(folder).parent.parts for folder in folders if file.is_relative_to(folder)), ())
    return ".".join((*base[: len(base) - level + 1], module))


def _module_files(module: str, folders: tuple[Path, ...], root: Path) -> Iterator[Path]:
    """Yield the files of an absolute import: in the workspace, or of kerneldecl those that can change an outcome."""
    package, _, rest = module.partition(".")
    if package == PACKAGE.name:
        return _resolved(rest, (PACKAGE,)) if rest and rest.partition(".")[0] not in _CHANGES_NOTHING else iter(())
    return _resolved(module, (*folders, root))


def _resolved(module: str, folders: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the file of a module, and of each package above it, from the first folder that has it."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = "/".join(parts[:end])
        files = (folder / file for folder in folders for file in (f"{path}/__init__.py", f"{path}.py"))
        yield from itertools.islice(filter(Path.is_file, files), 1)
