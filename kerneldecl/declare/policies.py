"""Owns the keys `policy` and `budget` of workloads.toml: which policies an entry asks, with which options, and what its search may take.

Knows nothing of what policies propose. Of a policy with options the module is imported, since it says itself which it takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from kerneldecl.declare.policy_values import frozen_value, items_of, name_of
from kerneldecl.declare.rule_attributes import Attribute, attributes_of
from kerneldecl.declare.toml_keys import Finding, Key, is_policy
from kerneldecl.diagnostics.messages import show, unknown
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.limits import BUDGET, SHARED_SECONDS, Budget
from kerneldecl.model import Policy, Value, uses
from kerneldecl.plugins.check import policy_problem
from kerneldecl.plugins.find import displayed, plugin_file
from kerneldecl.plugins.load import blamed, load_module
from kerneldecl.plugins.policy_order import is_tuner, why_not_for


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_positive(value: object) -> bool:
    return type(value) in {int, float} and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]  # both are numbers


def _is_share(value: object) -> bool:
    return _is_positive(value) and value <= 1  # type: ignore[operator]  # a number


BUDGET_KEYS: Mapping[str, Key] = {
    "trials": Key(_is_count, "an integer above 0", {"type": "integer", "minimum": 1}, "Candidates that are tried at most."),
    "seconds": Key(_is_positive, "a number above 0", {"type": "number", "exclusiveMinimum": 0}, "Seconds after which nothing is tried."),
    "stop_at": Key(
        _is_share,
        "a share above 0 and up to 1",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "Share of the peak of arithmetic, or of the memory's bandwidth where that is the limit, at which the search ends.",
    ),
}
assert tuple(BUDGET_KEYS) == BUDGET


SHARED: Mapping[str, Key] = {
    "seconds": Key(
        _is_positive,
        "a number above 0",
        {"type": "number", "exclusiveMinimum": 0},
        "Seconds that the searches of all entries may take together, dealt out by calls and by the time that is left to gain.",
    ),
}
"""Keys of the table `[budget]`."""


def shared_budget(table: Mapping[str, Any]) -> Budget:
    """Return what the table `[budget]` puts into the budget of each entry; wrong values count as absent."""
    secs = table.get("seconds")
    return ((SHARED_SECONDS, float(secs)),) if SHARED["seconds"].is_right(secs) else ()  # type: ignore[arg-type]  # a number


def budget_findings(budget: object) -> Iterator[Finding]:
    """Yield the mistakes of the table `budget`."""
    if isinstance(budget, dict):  # what is none is reported by `wrong_values`
        yield from _limit_findings(budget, "budget", ("budget",))


def _limit_findings(table: Mapping[str, Any], where: str, path: tuple[str, ...]) -> Iterator[Finding]:
    for name, value in table.items():
        if name not in BUDGET_KEYS:
            yield Finding.of(path, *unknown("key", name, BUDGET_KEYS, where=f"of {where}"))
        elif not BUDGET_KEYS[name].is_right(value):
            yield Finding.of(path, f"{name} of {where} is {show(value)}; expected {BUDGET_KEYS[name].expected}")


def kind_findings(policy: Policy, root: Path, known: Iterable[str], kinds: Mapping[str, str]) -> Iterator[Finding]:
    """Yield each policy that is for another kind of arch than a target's; `kinds` gives these by target."""
    names = tuple(known)
    for name in (use.name for use in uses(policy) if use.name in names):
        for target, kind in kinds.items():
            if reason := why_not_for(root, name, kind):
                sentence = f"policy {name} {reason}, and target {target} is a {'CPU' if kind == 'cpu' else 'GPU'}"
                yield Finding.of(("policy",), sentence, 'write "auto", or one that `kerneldecl policies` lists for it')


def policy_findings(value: object, root: Path, known: Iterable[str]) -> Iterator[Finding]:
    """Yield the mistakes of a `policy` of the right form, whatever it is asked for."""
    if not is_policy(value):
        return  # reported by `wrong_values`
    seen: set[str] = set()
    names = tuple(known)
    for item in items_of(value):
        name = name_of(item)
        if name not in names:
            yield Finding.of(("policy",), *unknown("policy", name, names))
            continue
        if problem := policy_problem(root, name):
            yield Finding(("policy",), problem)
            continue
        if name in seen:
            yield Finding.of(("policy",), f"policy {name} stands twice in the list; expected each once")
        seen.add(name)
        table = {key: value for key, value in item.items() if key != "name"} if isinstance(item, dict) else {}
        yield from _option_findings(name, table, root)


def _option_findings(name: str, table: Mapping[str, Any], root: Path) -> Iterator[Finding]:
    """Yield the mistakes in the options of one policy; of a tuner, also where none are given: it may need some."""
    if not is_tuner(root, name):
        if table:
            yield Finding.of(("policy",), f"policy {name} takes no options; top_k says how many candidates it proposes")
        return
    yield from _limit_findings({key: value for key, value in table.items() if key in BUDGET}, f"policy {name}", ("policy",))
    try:
        options, attributes = options_of(root, name)
        given: dict[str, Value] = {}
        found = list(_read(name, {key: value for key, value in table.items() if key not in BUDGET}, attributes, given))
        if not found:
            with blamed(plugin_file("policies", root, name), root, f"Options of policy {name} fails"):
                found = [Finding.of(("policy",), f"policy {name}: {sentence}") for sentence in options(**given).problems()]
    except DeclarationError as error:
        found = [Finding(("policy",), problem) for problem in error.problems]
    yield from found


def _read(name: str, table: Mapping[str, Any], attributes: Mapping[str, Attribute], given: dict[str, Value]) -> Iterator[Finding]:
    """Put the values of a tuner's options into `given`; yield the mistakes."""
    for key, value in table.items():
        if key not in attributes:
            yield Finding.of(("policy",), *unknown("option", key, (*attributes, *BUDGET), where=f"of policy {name}"))
            continue
        given[key], mistakes = attributes[key].read(frozen_value(value))
        yield from (Finding.of(("policy",), f"policy {name}: {sentence}", hint) for sentence, hint in mistakes)


def options_of(root: Path, name: str) -> tuple[Any, Mapping[str, Attribute]]:
    """Return a tuner's class of options and these by name; raise DeclarationError where it has none that is a dataclass."""
    file = plugin_file("policies", root, name)
    options = getattr(load_module("policies", root, name), "Options", None)
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        sentence, hint = f"policy {name} has no dataclass Options, which says what a tuner takes", "write one, or leave out IS_TUNER"
        raise DeclarationError([Problem(displayed(file, root), sentence, hint)])
    with blamed(file, root, f"Options of policy {name} cannot be read"):
        return options, attributes_of(options, get_type_hints(options, include_extras=True))
