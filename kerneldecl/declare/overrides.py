"""Owns what the command line puts in place of an entry's settings for one build: `-D top_k=3`, `--policy random`.

Knows nothing of what a build makes of it: entries so tuned are never taken for the declared ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli

from kerneldecl.declare.document import Declaration, scope_of
from kerneldecl.declare.policy_values import budget_of, dispatched, policy_of
from kerneldecl.declare.toml_keys import SETTINGS, is_name, wrong_values
from kerneldecl.diagnostics.messages import unknown
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.model import Workload

OPTION = "-D"
KEYS = tuple(key for key in SETTINGS if key != "targets")
"""What may be overridden: how an entry is tuned. An attribute of its rule makes another entry."""


def overrides_of(texts: Iterable[str]) -> dict[str, Any]:
    """Return the values of several `KEY=VALUE`; raise DeclarationError for what is none, or stands there twice."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise _wrong(OPTION, f"{text!r} is no KEY=VALUE", "write -D top_k=3")
        if key not in KEYS:
            sentence, hint = unknown("key", key, KEYS)
            raise _wrong(OPTION, sentence, hint or "a rule's attribute makes another entry: declare that in workloads.toml")
        if key in found:
            raise _wrong(OPTION, f"{key} stands there twice", "give it once")
        found[key] = value_of(OPTION, value, key)
    return found


def value_of(option: str, text: str, key: str = "policy") -> Any:
    """Return what an option of the command line gives as a TOML value or a name; raise DeclarationError where it is neither."""
    try:
        return tomli.loads(f"{key} = {text}")[key]
    except tomli.TOMLDecodeError as error:
        if is_name(text):
            return text
        example = '\'["auto", "evolution"]\'' if key == "policy" else "3, 0.01, steady or '{ trials = 64 }'"
        raise _wrong(option, f"neither a name nor a TOML value: {error.msg}", f"write {example}") from None


def overridden(root: Path, values: Mapping[str, Any], declaration: Declaration, option: str = OPTION) -> tuple[Workload, ...]:
    """Return a declaration's workloads with other settings; raise DeclarationError, naming the option, for a mistake."""
    scope = scope_of(root, {"target": {name: {"arch": arch} for name, arch in declaration.targets}})
    findings = list(wrong_values(values, SETTINGS))
    if not findings:
        findings = [*scope.settings_findings(values), *(scope.kind_findings(values) if "policy" in values else ())]
    if findings:
        raise DeclarationError(dict.fromkeys(replace(finding.problem, file=option) for finding in findings))
    return tuple(_with(workload, values) for workload in declaration.workloads)


def _with(workload: Workload, values: Mapping[str, Any]) -> Workload:
    policy = policy_of(values["policy"]) if "policy" in values else workload.policy
    budget = {**dict(workload.budget), **dict(budget_of(values.get("budget", {})))}
    return replace(
        workload,
        policy=dispatched(policy, values.get("dispatch", "")),
        top_k=values.get("top_k", workload.top_k),
        tolerance=values.get("tolerance", workload.tolerance),
        timing=values.get("timing", workload.timing),
        budget=tuple(sorted(budget.items())),
    )


def _wrong(option: str, sentence: str, hint: str) -> DeclarationError:
    return DeclarationError([Problem(option, sentence, hint)])
