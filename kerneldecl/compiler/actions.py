"""Owns the actions that need TVM, as plain functions of JSON values: lower, build, describe.

Knows nothing of processes, policies, keys of records or the order of actions.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.compiler import codegen, tensorir
from kerneldecl.compiler.space import iter_space
from kerneldecl.cxx import link_shared_library
from kerneldecl.key import digest
from kerneldecl.model import Candidate, frozen
from kerneldecl.plugins import load_rule
from kerneldecl.rule import Rule
from kerneldecl.serial import arch_from_json, to_json


def lower(root: str, rule: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Lower a rule and return what the later stages need to know of the computation."""
    declared = _rule(root, rule, attrs)
    mod = tensorir.lower(declared)
    return {
        "computation": tensorir.module_digest(mod),
        "signature": to_json(declared.signature()),
        "flops": declared.flops(),
        "least_bytes": declared.least_bytes(),
        "tolerance": declared.tolerance(),
        "space": to_json(iter_space(mod)),
    }


def build(
    root: str, rule: str, attrs: Mapping[str, Any], candidate: Mapping[str, Any], arch: Mapping[str, Any], folder: str
) -> dict[str, Any]:
    """Apply a candidate, compile it and link it alone into `folder`; return digests, or a failure if it does not apply."""
    mod, parsed = _lowered(root, rule, attrs), arch_from_json(arch)
    schedule = codegen.apply_candidate(Path(root), mod, Candidate.from_json(candidate), parsed)
    if schedule is None:
        return {"failure": "the template does not apply"}
    symbol = tensorir.symbol(tensorir.module_digest(mod))
    content = codegen.compile_object(schedule.mod, parsed, symbol)
    code = digest(content)
    path = Path(folder) / f"{code}.o"
    path.write_bytes(content)
    link_shared_library(path.with_suffix(".so"), [path])
    return {"scheduled": tensorir.module_digest(schedule.mod), "code": code, "code_bytes": len(content), "symbol": symbol}


def describe(root: str, rule: str, attrs: Mapping[str, Any], candidate: Mapping[str, Any], arch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an artifact holds of a candidate beside its object file: database lines and the scheduled source."""
    mod, parsed = _lowered(root, rule, attrs), arch_from_json(arch)
    schedule = codegen.apply_candidate(Path(root), mod, Candidate.from_json(candidate), parsed)
    assert schedule is not None, "a winner applies"
    lines = codegen.database_lines(schedule, mod, parsed)
    return {"database": json.dumps(dataclasses.asdict(lines), sort_keys=True), "source": schedule.mod["main"].script()}


def _rule(root: str, rule: str, attrs: Mapping[str, Any]) -> Rule:
    return load_rule(Path(root), rule)(**{name: frozen(value) for name, value in attrs.items()})


@functools.lru_cache(maxsize=4)
def _lowered_once(root: str, rule: str, attrs: tuple[tuple[str, Any], ...]) -> tvm.IRModule:
    return tensorir.lower(_rule(root, rule, dict(attrs)))


def _lowered(root: str, rule: str, attrs: Mapping[str, Any]) -> tvm.IRModule:
    return _lowered_once(root, rule, tuple(sorted((name, frozen(value)) for name, value in attrs.items())))
