"""Owns the reading of workloads.toml into a Declaration, with every mistake reported at once.

Knows nothing of keys, plans, schedules or compilers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli

from kerneldecl.declare.imports import IMPORT, Import, imports_of
from kerneldecl.declare.limits import LIMITS, limits_of
from kerneldecl.declare.policies import SHARED, budget_findings, shared_budget
from kerneldecl.declare.shared_cache import CACHE, TRUST, credentials_in, shared_cache_of
from kerneldecl.declare.toml_keys import (
    ARTIFACT,
    ARTIFACT_REQUIRED,
    EDITIONS,
    FILE,
    FOLDER_NAME,
    SETTINGS,
    TARGET,
    TOOLCHAIN,
    Finding,
    Key,
    Settings,
    is_folder_name,
    is_name,
    missing_keys,
    settings,
    unknown_keys,
    wrong_values,
)
from kerneldecl.declare.workload_table import Scope, expand_table
from kerneldecl.diagnostics import line_numbers
from kerneldecl.diagnostics.messages import show, unknown
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.limits import Limits
from kerneldecl.model import Workload
from kerneldecl.plugins.find import HOST, plugin_names
from kerneldecl.plugins.load import load_arch
from kerneldecl.store.keys import digest
from kerneldecl.store.regular import read_file
from kerneldecl.store.remote import SharedCache
from kerneldecl.toolchain.versions import PINS, why_not_compiled

_TOP = ("edition", "artifact", "toolchain", "target", "defaults", "budget", "limits", "cache", "trust", "import", "workload")

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Declaration:
    """The content of workloads.toml, every default filled in."""

    artifact: str
    version: str
    toolchain: Mapping[str, str]
    targets: tuple[tuple[str, str], ...]
    """Name and arch of each target, in order of the file."""
    workloads: tuple[Workload, ...]
    """Workloads in order of the file."""
    path: Path
    limits: Limits = field(default_factory=Limits)
    """What workers may use; no key depends on it."""
    cache: SharedCache | None = None
    """The cache that several machines share; no key depends on it."""
    trusted: tuple[str, ...] = ()
    """Public keys of those whose packages count; empty: everybody's do."""
    imports: tuple[Import, ...] = ()
    """Published packages whose records this workspace builds on."""
    has_headers: bool = False
    """Whether artifacts carry kernels as headers, too."""
    digest: str = ""
    """Digest of the file's bytes as they were read."""


def declare(root: Path, content: bytes | None = None) -> Declaration:
    """Return the declaration of the workspace's file, or of `content` in its place; raise DeclarationError with all mistakes."""
    content = _read(root) if content is None else content
    document, text = parse(content), decode(content)
    tables = _workload_tables(document)
    lines = line_numbers.array_lines(text, "workload", len(tables))
    scope = scope_of(root, document)
    findings = list(_document_findings(document, root, scope))
    expansions = [expand_table(table, scope, line) for table, line in zip(tables, lines, strict=True)]
    for position, expansion in enumerate(expansions):
        findings += (finding.below(("workload", position)) for finding in expansion.findings)
    findings += _duplicates(tables, lines, scope)
    if findings:
        raise DeclarationError(_located(findings, text))
    workloads = tuple(workload for expansion in expansions for workload in expansion.workloads)
    return replace(declared(root, document, workloads), digest=digest(content))


def declared(root: Path, document: Document, workloads: tuple[Workload, ...]) -> Declaration:
    """Return the declaration of a valid document, with these workloads."""
    return Declaration(
        artifact=document["artifact"]["name"],
        version=document["artifact"]["version"],
        toolchain={**PINS, **document.get("toolchain", {})},
        targets=tuple((name, target["arch"]) for name, target in document["target"].items()),
        workloads=workloads,
        path=root / FILE,
        limits=limits_of(_table(document, "limits")),
        cache=shared_cache_of(_table(document, "cache"), _table(document, "trust")),
        trusted=tuple(_table(document, "trust").get("keys", ())),
        imports=imports_of(_table(document, "import")),
        has_headers=document["artifact"].get("headers", False),
    )


def parse(content: bytes) -> Document:
    """Return the TOML document; raise DeclarationError where it is not TOML, empty, or of an unknown edition."""
    text = decode(content)
    try:
        document = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        hint = next((hint for begin, hint in _TOML_HINTS if error.msg.startswith(begin)), "")
        raise _failure(f"not TOML: {error.msg} (column {error.colno})", error.lineno, hint) from None
    except ValueError:
        raise _failure("an integer has more than 4300 digits", _line_of(_LONG_INTEGER, text)) from None
    except RecursionError:
        raise _failure("lists, tables or keys are nested too deeply", _line_of(_DEEP_NEST, text)) from None
    if not document:
        raise _failure("the file is empty", hint="`kerneldecl init` writes an example")
    edition = document.get("edition")
    if type(edition) is not int or edition not in EDITIONS:
        supported = f"supported {'edition' if len(EDITIONS) == 1 else 'editions'}: {', '.join(map(str, EDITIONS))}"
        if edition is None:
            raise _failure(f"edition is missing; {supported}", hint=f"write edition = {EDITIONS[-1]} as the first line")
        line = line_numbers.line_of(line_numbers.key_lines(text), ("edition",))
        raise _failure(f"edition {show(edition)} is not supported; {supported}", line, f"write edition = {EDITIONS[-1]}")
    return document


_TOML_HINTS = (
    ("Cannot declare ('workload',) twice", "write [[workload]], in two brackets, above each"),
    ("Cannot declare", "a table stands once: put its keys together"),
    ("Cannot overwrite", "a key stands once in a table: remove one of them"),
    ("Illegal character", "end the string with a quote"),
    ("Unterminated string", "end the string with a quote"),
    ("Invalid value", "strings stand in quotes, truth values are true and false"),
    ("Expected '='", "write KEY = VALUE"),
    ("Unclosed array", "end the list with ]"),
)
"""What to do about mistakes of TOML, by how its reader words them."""
_LONG_INTEGER = re.compile(r"[0-9_]{4300,}")
_DEEP_NEST = re.compile(r"(?:[\[{][^\[\]{}]*){100}|(?:[\w-]+\.){100}")


def _line_of(pattern: re.Pattern[str], text: str) -> int:
    """Return the line where the pattern first fits; 0 where it does not."""
    found = pattern.search(text)
    return text.count("\n", 0, found.start()) + 1 if found else 0


def decode(content: bytes) -> str:
    """Return the text of a workspace file; raise DeclarationError that names the line of the first byte that is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before, byte = error.object[: error.start], error.object[error.start]
        raise _failure(f"byte 0x{byte:02x} is not UTF-8", before.count(b"\n") + 1, "save the file as UTF-8") from None


def scope_of(root: Path, document: Document) -> Scope:
    """Return what the document's tables may refer to; wrong values count as absent."""
    targets = tuple(_table(document, "target"))
    defaults = {key: value for key, value in _table(document, "defaults").items() if key in SETTINGS and SETTINGS[key].is_right(value)}
    if any(budget_findings(defaults.get("budget"))):
        del defaults["budget"]
    return Scope(
        root=root,
        targets=targets,
        policies=plugin_names("policies", root),
        rules=plugin_names("rules", root),
        defaults=settings(defaults, Settings(targets)),
        archs={name: table["arch"] for name, table in _table(document, "target").items() if _has_arch(table)},
        shared_budget=shared_budget(_table(document, "budget")),
        timings=_said_by_targets(document, "timing"),
        dispatches=_said_by_targets(document, "dispatch"),
    )


def _has_arch(table: object) -> bool:
    return isinstance(table, dict) and isinstance(table.get("arch"), str)


def _said_by_targets(document: Document, key: str) -> dict[str, str]:
    """Return the right values of a key that targets have, by target."""
    targets = {name: table for name, table in _table(document, "target").items() if isinstance(table, dict) and key in table}
    return {name: table[key] for name, table in targets.items() if TARGET[key].is_right(table[key])}


def _read(root: Path) -> bytes:
    try:
        return read_file(root / FILE)
    except FileNotFoundError:
        raise _failure(f"no such file in {root.resolve()}", hint="`kerneldecl init` writes one") from None
    except OSError as error:
        raise _failure(f"cannot be read: {error.strerror}") from None


def _failure(sentence: str, line: int = 0, hint: str = "") -> DeclarationError:
    return DeclarationError([Problem(FILE, sentence, hint, line=line)])


def _table(document: Document, name: str) -> Document:
    table = document.get(name, {})
    return table if isinstance(table, dict) else {}


def _workload_tables(document: Document) -> list[Document]:
    tables = document.get("workload", [])
    return [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []


def _document_findings(document: Document, root: Path, scope: Scope) -> Iterator[Finding]:
    """Yield every mistake outside the `[[workload]]` tables."""
    unknown_top = list(unknown_keys(document, _TOP))
    yield from unknown_top
    yield from _table_findings(document, ("artifact",), ARTIFACT, required=ARTIFACT_REQUIRED)
    yield from _table_findings(document, ("toolchain",), TOOLCHAIN)
    yield from _table_findings(document, ("defaults",), SETTINGS)
    yield from _table_findings(document, ("limits",), LIMITS)
    yield from _table_findings(document, ("budget",), SHARED, required=SHARED if "budget" in document else ())
    yield from _cache_findings(document)
    yield from _import_findings(document)
    yield from _target_findings(document, root)
    found = scope.settings_findings(_table(document, "defaults"))
    yield from (finding.below(("defaults",), "[defaults]") for finding in found)
    tables = document.get("workload", [])
    if not isinstance(tables, list) or len(_workload_tables(document)) < len(tables):
        yield Finding.of(("workload",), f"workload is {show(tables)}; expected tables", "write [[workload]] above each")
    elif not tables and not unknown_top:
        yield Finding.of((), "no workloads; expected at least one [[workload]] table")


def _table_findings(
    document: Document, path: line_numbers.Path, keys: Mapping[str, Key], *, required: Iterable[str] = ()
) -> Iterator[Finding]:
    """Yield the mistakes of the table at the end of a path; where keys are required, the table is, too."""
    name = ".".join(map(str, path))
    table = document.get(str(path[-1]), {})
    if not isinstance(table, dict):
        yield Finding.of(path, f"{name} is {show(table)}; expected a table [{name}]")
        return
    found = (*unknown_keys(table, keys), *wrong_values(table, keys), *missing_keys(table, {key: keys[key] for key in required}))
    yield from (finding.below(path, f"[{name}]") for finding in found)


def _cache_findings(document: Document) -> Iterator[Finding]:
    secret = [finding.below(("cache",), "[cache]") for finding in credentials_in(_table(document, "cache"))]
    needed = ("url",) if "cache" in document else ()
    # A secret is not repeated, as a value that is wrong would be.
    yield from secret or _table_findings(document, ("cache",), CACHE, required=needed)
    yield from _table_findings(document, ("trust",), TRUST, required=TRUST if "trust" in document else ())


def _import_findings(document: Document) -> Iterator[Finding]:
    imports = document.get("import", {})
    if not isinstance(imports, dict):
        yield Finding.of(("import",), f"import is {show(imports)}; expected a table [import.NAME]")
        return
    for name in imports:
        if not is_name(name):
            yield Finding.of(("import", name), f"import is named {show(name)}; expected a name of letters, digits, - and _")
        yield from _table_findings(imports, ("import", name), IMPORT, required=("url",))


def _target_findings(document: Document, root: Path) -> Iterator[Finding]:
    targets = document.get("target", {})
    if not isinstance(targets, dict):
        yield Finding.of(("target",), f"target is {show(targets)}; expected a table [target.NAME]")
        return
    if not targets:
        yield Finding.of((), "no targets; expected at least one [target.NAME] table", 'write [target.host] with arch = "host"')
    archs, cuda = plugin_names("archs", root), _cuda(document)
    for name, target in targets.items():
        path = ("target", name)
        if not is_folder_name(name):
            yield Finding.of(path, f"target is named {show(name)}; expected {FOLDER_NAME}")
        yield from _table_findings(targets, path, TARGET, required=("arch",))
        arch = target.get("arch") if isinstance(target, dict) else None
        if isinstance(arch, str) and is_name(arch):
            yield from (finding.below(path, f"[target.{name}]") for finding in _arch_findings(arch, archs, root, cuda))


def _cuda(document: Document) -> str:
    """Return the declared version of CUDA; the default where the declared value is wrong."""
    declared = _table(document, "toolchain").get("cuda")
    return declared if declared is not None and TOOLCHAIN["cuda"].is_right(declared) else PINS["cuda"]


def _arch_findings(arch: str, archs: tuple[str, ...], root: Path, cuda: str) -> Iterator[Finding]:
    if arch not in archs:
        yield Finding.of(("arch",), *unknown("arch", arch, archs))
    elif arch != HOST:
        try:
            sentence, hint = why_not_compiled(load_arch(root, arch), cuda)
        except DeclarationError as error:
            yield from (Finding(("arch",), problem) for problem in error.problems)
            return
        if sentence:
            yield Finding.of(("arch",), sentence, hint)


def _duplicates(tables: Iterable[Document], lines: Sequence[int], scope: Scope) -> Iterator[Finding]:
    """Yield each table with the name and a target of an earlier one, even if their expansions would have different names."""
    first: dict[tuple[str, str], int] = {}
    for position, table in enumerate(tables):
        name, targets = table.get("name"), table.get("targets", scope.defaults.targets)
        if not isinstance(name, str) or not ("targets" not in table or SETTINGS["targets"].is_right(targets)):
            continue
        earlier = min((first.setdefault((name, target), position) for target in targets), default=position)
        if earlier != position:
            sentence = f"duplicate name {show(name)}; first declared in line {lines[earlier]}"
            yield Finding.of(("workload", position, "name"), sentence, entry=name)


def _located(findings: Iterable[Finding], text: str) -> list[Problem]:
    """Return the problems in order of their lines, without duplicates: a broken rule is one mistake, however many entries use it."""
    lines = line_numbers.key_lines(text)
    problems: dict[tuple[str, ...], Problem] = {}
    for finding in findings:
        problem = finding.problem
        if problem.file == FILE:
            problem = replace(problem, line=problem.line or line_numbers.line_of(lines, finding.path))
        where = (problem.entry,) if problem.file == FILE else ()
        problems.setdefault((problem.file, str(problem.line), problem.sentence, *where), problem)
    return sorted(problems.values(), key=lambda problem: (problem.file != FILE, problem.file, problem.line))
