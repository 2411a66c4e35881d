"""Owns the keys that tables of workloads.toml have in common: which are known and what each must be.

Knows nothing of rules, of expansion or of line numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kerneldecl.declare.policy_values import DISPATCHES, budget_of, policy_of
from kerneldecl.diagnostics.line_numbers import Path
from kerneldecl.diagnostics.messages import rewritten, show, unknown
from kerneldecl.errors import Problem
from kerneldecl.limits import MOST_TOLERANCE, Budget
from kerneldecl.model import Policy
from kerneldecl.timing import DEFAULT_TIMING, TIMINGS
from kerneldecl.toolchain.versions import PINS

FILE = "workloads.toml"
EDITIONS = (1,)
"""Supported formats of the file."""
NAME = re.compile(r"[A-Za-z0-9_.-]+")
LONGEST_PATH = 1024
_VERSION = re.compile(r"[A-Za-z0-9_.+!-]+")
_FOLDER_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,100}(?<!\.bundle)")
_FOLDER_VERSION = re.compile(r"[A-Za-z0-9_.+!-]{1,64}")


@dataclass(frozen=True)
class Finding:
    """A mistake by its path in the document; it becomes a Problem once lines are looked up."""

    path: Path
    problem: Problem
    """The mistake; its line is 0 unless it is in another file."""

    @classmethod
    def of(cls, path: Path, sentence: str, hint: str = "", entry: str = "") -> Finding:
        return cls(path, Problem(FILE, sentence, hint, entry=entry))

    def below(self, path: Path, entry: str = "") -> Finding:
        """Return the finding of a table within the document."""
        return Finding((*path, *self.path), replace(self.problem, entry=self.problem.entry or entry))


@dataclass(frozen=True)
class Key:
    """The accepted values of one key of a table: for the checker, for a person, for an editor."""

    is_right: Callable[[Any], bool]
    expected: str
    schema: Mapping[str, Any]
    """JSON Schema of the accepted values."""
    summary: str


@dataclass(frozen=True)
class Settings:
    """Settings of an entry's tuning: those of its table, or the defaults."""

    targets: tuple[str, ...]
    policy: Policy = "auto"
    budget: Budget = ()
    top_k: int = 20
    tolerance: float | None = None
    timing: str = ""
    """Empty where the target's holds, or the default."""
    dispatch: str = ""
    """As `timing`."""


def is_name(value: object) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def is_policy(value: object) -> bool:
    """Say whether a value has the form of `policy`: a name, a table with a name, or a list of them."""
    return _is_policy_item(value) or (isinstance(value, list) and bool(value) and all(map(_is_policy_item, value)))


def _is_policy_item(value: object) -> bool:
    return is_name(value) or (isinstance(value, dict) and is_name(value.get("name")))


def is_folder_name(value: object) -> bool:
    """Say whether a value can name an artifact or a target: a folder, which is neither hidden, nor `..`, nor a bundle's."""
    return isinstance(value, str) and _FOLDER_NAME.fullmatch(value) is not None


def _is_folder_version(value: object) -> bool:
    return isinstance(value, str) and _FOLDER_VERSION.fullmatch(value) is not None


def _is_version(value: object) -> bool:
    return isinstance(value, str) and _VERSION.fullmatch(value) is not None


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(is_name, value)) and len(set(value)) == len(value)


def _is_tolerance(value: object) -> bool:
    return type(value) in {int, float} and 0 <= value <= MOST_TOLERANCE  # type: ignore[operator]  # both are numbers


_LETTERS = "letters, digits, _, - and ."
_NAME_SCHEMA = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_NAMES_SCHEMA = {"type": "array", "items": _NAME_SCHEMA, "uniqueItems": True}


_POLICY_ITEMS = [_NAME_SCHEMA, {"type": "object", "properties": {"name": _NAME_SCHEMA}, "required": ["name"]}]


def name_key(summary: str) -> Key:
    return Key(is_name, f"a name of {_LETTERS}", _NAME_SCHEMA, summary)


FOLDER_NAME = f"a name of at most 100 {_LETTERS}, without a dot in front or .bundle at the end"


def version_key(summary: str) -> Key:
    return Key(_is_version, "a version in quotes", {"type": "string", "pattern": f"^{_VERSION.pattern}$"}, summary)


TIMING = Key(
    lambda value: isinstance(value, str) and value in TIMINGS,
    f"{', '.join(TIMINGS[:-1])} or {TIMINGS[-1]}",
    {"enum": list(TIMINGS)},
    f"How kernels are timed when winners are chosen; {DEFAULT_TIMING} by default.",
)
DISPATCH = Key(
    lambda value: isinstance(value, str) and value in DISPATCHES,
    f"{', '.join(DISPATCHES[:-1])} or {DISPATCHES[-1]}",
    {"enum": list(DISPATCHES)},
    f"What may win: kernels that are tuned here, a vendor's library, or the fastest of both; {DISPATCHES[0]} by default.",
)
SETTINGS: Mapping[str, Key] = {
    "targets": Key(
        lambda value: _are_names(value) and bool(value),
        "a list of target names, each once",
        {**_NAMES_SCHEMA, "minItems": 1},
        "Targets to build for; all of the file by default.",
    ),
    "policy": Key(
        is_policy,
        f"a name of {_LETTERS}, a table with a name and options, or a list of them",
        {"anyOf": [*_POLICY_ITEMS, {"type": "array", "minItems": 1, "items": {"anyOf": _POLICY_ITEMS}}]},
        "Policy that proposes candidates, or several: what one has measured starts the next.",
    ),
    "budget": Key(
        lambda value: isinstance(value, dict) and bool(value),
        "a table such as { trials = 200, seconds = 60, stop_at = 0.95 }",
        {"type": "object", "minProperties": 1},
        "What the search of an entry may take.",
    ),
    "top_k": Key(
        lambda value: type(value) is int and value > 0,
        "an integer above 0",
        {"type": "integer", "minimum": 1},
        "How many of the best-ranked candidates are built and measured.",
    ),
    "tolerance": Key(
        _is_tolerance,
        "a number from 0 to 1",
        {"type": "number", "minimum": 0, "maximum": MOST_TOLERANCE},
        "Relative error allowed; the rule's own by default.",
    ),
    "timing": TIMING,
    "dispatch": DISPATCH,
}
WORKLOAD: Mapping[str, Key] = {
    "name": name_key("Name of the entry; expanded attributes are appended: name[m=16]."),
    "rule": name_key("Operator: the stem of a file in rules/."),
    **SETTINGS,
    "generation": Key(
        lambda value: type(value) is int and value >= 0,
        "an integer of at least 0",
        {"type": "integer", "minimum": 0},
        "Raised by hand to tune again where a record exists.",
    ),
    "specialize": Key(
        lambda value: isinstance(value, str) and value.endswith(".py"),
        "the path of a .py file, relative to the workspace",
        {"type": "string", "pattern": r"\.py$"},
        "File whose specialize(mod, arch) returns custom kernels, which compete with the policy's candidates.",
    ),
    "nan": Key(
        lambda value: isinstance(value, str) and value in {"propagate", "ignore"},
        "propagate or ignore",
        {"enum": ["propagate", "ignore"]},
        "Whether maxima and minima of NaN are NaN, or anything, which some machines compute faster; propagate by default.",
    ),
    "tags": Key(_are_names, f"a list of tags of {_LETTERS}, each once", _NAMES_SCHEMA, "Tags that the pattern tag:TAG selects by."),
    "cases": Key(
        lambda value: isinstance(value, list) and bool(value) and all(isinstance(case, dict) and case for case in value),
        "a list of tables such as {m = 1, n = 2}",
        {"type": "array", "minItems": 1, "items": {"type": "object", "minProperties": 1}},
        "Paired values: one entry for each table of attributes.",
    ),
}
ARTIFACT: Mapping[str, Key] = {
    "name": Key(is_folder_name, FOLDER_NAME, {"type": "string", "pattern": f"^{_FOLDER_NAME.pattern}$"}, "Name of the artifact."),
    "version": Key(
        _is_folder_version,
        "a version of at most 64 characters, in quotes",
        {"type": "string", "pattern": f"^{_FOLDER_VERSION.pattern}$"},
        "Version of the artifact.",
    ),
    "headers": Key(
        lambda value: isinstance(value, bool),
        "true or false",
        {"type": "boolean", "default": False},
        "Whether artifacts carry each kernel as a header of CUDA or C++ too, which programs compile without TVM.",
    ),
}
ARTIFACT_REQUIRED = ("name", "version")
TOOLCHAIN: Mapping[str, Key] = {
    tool: version_key(f"Version of {tool} that kernels are built with; {pin} by default.") for tool, pin in PINS.items()
}
TARGET: Mapping[str, Key] = {
    "arch": name_key("Machine to build for: the stem of a file in archs/, or host for this one."),
    "timing": TIMING,
    "dispatch": DISPATCH,
}


def unknown_keys(table: Iterable[str], known: Iterable[str]) -> Iterator[Finding]:
    names = tuple(known)
    for key in table:
        if key not in names:
            yield Finding.of((key,), *unknown("key", key, names))


def wrong_values(table: Mapping[str, object], keys: Mapping[str, Key]) -> Iterator[Finding]:
    for key, value in table.items():
        if key in keys and not keys[key].is_right(value):
            yield Finding.of((key,), f"{key} is {show(value)}; expected {keys[key].expected}", rewritten(value, keys[key].expected))


def missing_keys(table: Mapping[str, object], required: Mapping[str, Key]) -> Iterator[Finding]:
    for key in required:
        if key not in table:
            yield Finding.of((), f"{key} is missing; expected {required[key].expected}")


def unknown_targets(table: Mapping[str, Any], targets: tuple[str, ...]) -> Iterator[Finding]:
    """Yield each target that does not exist; values that are not names are left to `wrong_values`."""
    named = table.get("targets", ())
    for target in named if _are_names(named) else ():
        if target not in targets:
            yield Finding.of(("targets",), *unknown("target", target, targets))


def settings(table: Mapping[str, Any], defaults: Settings) -> Settings:
    """Return the settings of a checked table, completed by the defaults."""
    tolerance = table.get("tolerance", defaults.tolerance)
    return Settings(
        targets=tuple(table.get("targets", defaults.targets)),
        policy=policy_of(table["policy"]) if "policy" in table else defaults.policy,
        budget=budget_of(table["budget"]) if "budget" in table else defaults.budget,
        top_k=table.get("top_k", defaults.top_k),
        tolerance=None if tolerance is None else float(tolerance),
        timing=table.get("timing", defaults.timing),
        dispatch=table.get("dispatch", defaults.dispatch),
    )
