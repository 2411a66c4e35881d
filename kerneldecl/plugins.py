"""Owns plug-ins: rules, policies, templates and archs, each one file, found by its stem and loaded.

Knows nothing of what is declared with them. A file in the workspace's folder of the kind comes before the standard one
of that name; a stem that starts with an underscore is private to its neighbours.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kerneldecl.diagnostics.messages import unknown
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.model import SPECIALIZE, Arch
from kerneldecl.rule import Rule

Kind = Literal["rules", "policies", "templates", "archs"]

HOST = "host"
"""The arch that is detected instead of read from a file."""

_PACKAGE = Path(__file__).parent
STANDARD = _PACKAGE
"""A root that has the standard plug-ins alone."""
_SYNTHETIC = "_kerneldecl_"
_SYNTHETIC_NAME = re.compile(rf"{_SYNTHETIC}([a-z]+)_[0-9a-f]{{16}}")
_SINGULAR: Mapping[Kind, str] = {"rules": "rule", "policies": "policy", "templates": "template", "archs": "arch"}
_METHODS = ("signature", "lower", "reference", "flops")
# Attributes share a table with these keys of every workload.
_RESERVED = frozenset({"name", "rule", "targets", "policy", "top_k", "tolerance", "generation", "specialize", "tags", "cases"})


# Finding


def plugin_folders(kind: Kind, root: Path) -> tuple[Path, ...]:
    """Return where plug-ins of a kind are looked for, in order: the workspace's folder, which need not exist, and the standard one."""
    standard = _PACKAGE / kind
    if kind == "rules" and not standard.is_dir():
        standard = _PACKAGE.parent / kind  # a checkout: only the wheel has them inside the package
    own = root / kind
    return (own,) if own.resolve() == standard.resolve() else (own, standard)


def plugin_names(kind: Kind, root: Path) -> tuple[str, ...]:
    """Return the names that may be declared, sorted."""
    suffix = _suffix(kind)
    files = (file for folder in plugin_folders(kind, root) for file in folder.glob(f"*{suffix}"))
    stems = {file.stem for file in files if not file.stem.startswith("_") and (suffix == ".toml" or file.stem.isidentifier())}
    return tuple(sorted(stems | {HOST} if kind == "archs" else stems))


def plugin_file(kind: Kind, root: Path, name: str) -> Path:
    """Return the file of a plug-in; raise DeclarationError where there is none. The arch `host` has no file."""
    files = _files(kind, root, name)
    if not files or name.startswith("_"):
        sentence, hint = unknown(_SINGULAR[kind], name, plugin_names(kind, root))
        raise DeclarationError([Problem(f"{kind}/{name}{_suffix(kind)}", 0, "", sentence, hint)])
    return files[0]


def shadowed_file(kind: Kind, root: Path, name: str) -> Path | None:
    """Return the standard file that a workspace's file of the same name replaces."""
    return next(iter(_files(kind, root, name)[1:]), None)


def rules_folders(root: Path) -> tuple[Path, ...]:
    return plugin_folders("rules", root)


def rule_names(root: Path) -> tuple[str, ...]:
    return plugin_names("rules", root)


def rule_file(root: Path, name: str) -> Path:
    return plugin_file("rules", root, name)


def shadowed(root: Path, name: str) -> Path | None:
    """Return the standard rule that a workspace's rule of the same name replaces."""
    return shadowed_file("rules", root, name)


def _files(kind: Kind, root: Path, name: str) -> tuple[Path, ...]:
    files = (folder / f"{name}{_suffix(kind)}" for folder in plugin_folders(kind, root))
    return tuple(file for file in files if file.is_file())


def _suffix(kind: Kind) -> str:
    return ".toml" if kind == "archs" else ".py"


# What a plug-in is made of


def rule_files(root: Path, name: str) -> tuple[Path, ...]:
    return plugin_files("rules", root, name)


def plugin_files(kind: Kind, root: Path, name: str) -> tuple[Path, ...]:
    """Return a plug-in's file and all that it imports from its folders and the workspace, transitively: its own first, the rest sorted."""
    return _with_imports(plugin_file(kind, root, name), plugin_folders(kind, root), root)


def path_in_digests(file: Path, root: Path) -> str:
    """Return the name under which a file's content stands in digests: its path below its kind's folder, or below the workspace."""
    for kind in _SINGULAR:
        for folder in plugin_folders(kind, root):
            if file.is_relative_to(folder):
                return f"{kind}/{file.relative_to(folder)}"
    return str(file.relative_to(root))


def specialize_files(root: Path, path: str) -> tuple[Path, ...]:
    """Return the file that an entry's `specialize` names and all that it imports from its folder and the workspace, as `plugin_files`."""
    return _with_imports(root / path, ((root / path).parent,), root)


def _with_imports(first: Path, folders: tuple[Path, ...], root: Path) -> tuple[Path, ...]:
    found, waiting = {first}, [first] if first.suffix == ".py" else []
    while waiting:
        imported = set(_imported_files(waiting.pop(), folders, root)) - found
        found |= imported
        waiting += sorted(imported)
    return (first, *sorted(found - {first}))


def _imported_files(file: Path, folders: tuple[Path, ...], root: Path) -> Iterator[Path]:
    """Yield the files that a file's import statements resolve to."""
    for module, level in _imported_modules(file.read_bytes()):
        yield from _resolved(_absolute(module, level, file, folders), folders) if level else _module_files(module, folders, root)


def _absolute(module: str, level: int, file: Path, folders: tuple[Path, ...]) -> str:
    """Return a relative import's module as seen from the folder that the importing file lies below."""
    base = next((file.relative_to(folder).parent.parts for folder in folders if file.is_relative_to(folder)), ())
    return ".".join((*base[: len(base) - level + 1], module))


@functools.lru_cache(maxsize=256)  # neighbours that several rules import are parsed once
def _imported_modules(source: bytes) -> tuple[tuple[str, int], ...]:
    """Return the modules that a source imports, each with its leading dots; none if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
            found += [(name, node.level) for name in filter(None, (node.module, *names))]
    return tuple(found)


def _module_files(module: str, folders: tuple[Path, ...], root: Path) -> Iterator[Path]:
    """Yield the files of an absolute import that lie in the workspace or are standard plug-ins; the rest of kerneldecl is its version."""
    package, _, rest = module.partition(".")
    if package == _PACKAGE.name:
        kind, _, name = rest.partition(".")
        return _resolved(name, (_PACKAGE / kind,)) if kind in _SINGULAR and name else iter(())
    return _resolved(module, (*folders, root))


def _resolved(module: str, folders: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the file of a module, and of each package above it, from the first folder that has it."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = "/".join(parts[:end])
        files = (folder / file for folder in folders for file in (f"{path}/__init__.py", f"{path}.py"))
        yield from itertools.islice(filter(Path.is_file, files), 1)


# Loading Python


def load_rule(root: Path, name: str) -> type[Rule]:
    """Return the class that `rules/<name>.py` declares; raise DeclarationError where there is none."""
    file = rule_file(root, name)
    module = _imported("rules", root, name)
    class_name = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    rule = getattr(module, class_name, None)
    sentence = next(_defects(rule, name, class_name), None)
    if sentence:
        raise DeclarationError([Problem(displayed(file, root), 0, "", sentence)])
    assert isinstance(rule, type)
    return rule


def fields(rule: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Return the dataclass fields that are attributes, in order of the class."""
    return tuple(field for field in dataclasses.fields(rule) if field.init)


def load_policy(root: Path, name: str) -> ModuleType:
    return load_module("policies", root, name)


def load_template(root: Path, name: str) -> ModuleType:
    return load_module("templates", root, name)


def load_module(kind: Kind, root: Path, name: str) -> ModuleType:
    """Return the module of a plug-in; raise DeclarationError where its file is missing or fails to import."""
    file = plugin_file(kind, root, name)
    if file.parent == _PACKAGE / kind:
        return importlib.import_module(f"{_PACKAGE.name}.{kind}.{name}")
    return _imported(kind, root, name)


def specialize_problem(root: Path, path: str) -> Problem | None:
    """Return why a file cannot be what an entry's `specialize` names, as far as its text tells; it is not run."""
    file = root / path
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        return Problem(displayed(file, root), error.lineno or 0, "", f"{file.name} is not Python: {error.msg}")
    except ValueError as error:
        return Problem(displayed(file, root), 0, "", f"{file.name} is not Python: {error}")
    if any(isinstance(node, ast.FunctionDef) and node.name == SPECIALIZE for node in tree.body):
        return None
    return Problem(displayed(file, root), 0, "", "there is no function specialize(mod, arch)", "define it at the file's top level")


def own_functions(root: Path, path: str, mod: Any, arch: Arch) -> list[Any]:
    """Return what the function of a file that an entry names makes of a module; raise DeclarationError where the file fails."""
    file = root / path
    package = _package_of(SPECIALIZE, (file.parent,), specialize_files(root, path))
    with blamed(file, root, f"{file.name} fails to import"), _no_bytecode():
        module = importlib.import_module(f"{package}.{file.stem}")
    with blamed(file, root, "specialize() fails"):
        made = module.specialize(mod, arch)
        several = list(made) if isinstance(made, Iterator | list | tuple) else [made]
        return [each for each in several if each is not None]


@contextlib.contextmanager
def blamed(file: Path, root: Path, doing: str) -> Iterator[None]:
    """Turn whatever a plug-in's code raises into a DeclarationError that names its file and line."""
    try:
        yield
    except DeclarationError:
        raise
    except (Exception, SystemExit) as error:
        place, line = _place(error, file)
        message = _SYNTHETIC_NAME.sub(r"\1", error.msg if isinstance(error, SyntaxError) else str(error))
        sentence = f"{doing}: {type(error).__name__}: {message}" if message else f"{doing}: {type(error).__name__}"
        raise DeclarationError([Problem(displayed(place, root), line, "", " ".join(sentence.split()))]) from error


def displayed(file: Path, root: Path) -> str:
    """Return a file's path as messages show it: relative to the workspace where it lies inside."""
    resolved, base = file.resolve(), root.resolve()
    return str(resolved.relative_to(base)) if resolved.is_relative_to(base) else str(file)


def _place(error: BaseException, file: Path) -> tuple[Path, int]:
    """Return the innermost line of the plug-in's file or of its neighbours."""
    frames = [(Path(frame.filename), frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((Path(error.filename), error.lineno or 0))
    own = (frame for frame in reversed(frames) if frame[0].parent == file.parent)
    return next(own, (file, 0))


def _imported(kind: Kind, root: Path, name: str) -> ModuleType:
    """Import a file through Python's own import system, as a module of one synthetic package made of the kind's folders."""
    with blamed(plugin_file(kind, root, name), root, f"{_SINGULAR[kind]} {name} fails to import"), _no_bytecode():
        return importlib.import_module(f"{_package(kind, root)}.{name}")


def _package(kind: Kind, root: Path) -> str:
    """Return the name of the package whose modules are the files of a kind; edited files make another package."""
    folders = plugin_folders(kind, root)
    return _package_of(kind, folders, (file for folder in folders for file in folder.rglob("*.py")))


def _package_of(kind: str, folders: tuple[Path, ...], files: Iterable[Path]) -> str:
    content = hashlib.sha256(repr(tuple(folder.resolve() for folder in folders)).encode())
    for file in sorted(files):
        content.update(f"\n{file}\n".encode() + file.read_bytes())
    name = f"{_SYNTHETIC}{kind}_{content.hexdigest()[:16]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder) for folder in folders]
        importlib.invalidate_caches()  # else a file written within the clock's resolution is not seen
        sys.modules[name] = package
    return name


@contextlib.contextmanager
def _no_bytecode() -> Iterator[None]:
    # A check must write nothing, and bytecode is told stale by a clock of whole seconds.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _defects(rule: Any, name: str, class_name: str) -> Iterator[str]:
    """Yield why a module's attribute is not a rule."""
    if not isinstance(rule, type):
        yield f"rule {name} has no class {class_name}; a rule file holds a class of the file's name, in CamelCase"
        return
    if not issubclass(rule, Rule):
        yield f"class {class_name} does not derive from kerneldecl.rule.Rule"
        return
    if "__dataclass_params__" not in vars(rule) or not vars(rule)["__dataclass_params__"].frozen:
        yield f"class {class_name} is not a frozen dataclass; write @dataclass(frozen=True, kw_only=True) above it"
        return
    for method in _METHODS:
        if getattr(rule, method) is getattr(Rule, method):
            yield f"class {class_name} gives no {method}()"
    for field in fields(rule):
        if field.name in _RESERVED:
            yield f"attribute {field.name} of class {class_name} has the name of a key of every workload"


# Loading archs


def load_arch(root: Path, name: str) -> Arch:
    """Return the arch that `archs/<name>.toml` describes, or the detected one for `host`; raise DeclarationError for a wrong file."""
    if name == HOST:
        from kerneldecl.hardware.host import detect

        return detect()
    from kerneldecl.hardware.arch_file import read_arch

    file = plugin_file("archs", root, name)
    return read_arch(name, file.read_bytes(), displayed(file, root))
