"""Owns what can be said of fallbacks before anything is tuned: the entries of a model that no policy but the fallback takes.

Knows nothing of how a model is read or lowered. Policies are asked as a build asks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kerneldecl.declare.document import declare
from kerneldecl.extract.edit_toml import Function
from kerneldecl.model import FALLBACKS, Arch, IterSpace, Workload
from kerneldecl.planning.fallbacks import Call, calls_of, share
from kerneldecl.plugins.load import load_arch, load_module
from kerneldecl.plugins.policy_order import ranking_policies
from kerneldecl.serial import space_from_json

Described = Mapping[str, Any]
"""What the extraction found out of a function: `work` with operations and bytes, and its iteration space as JSON; null without one."""


def expected_fallbacks(root: Path, model: str, functions: Mapping[Function, Described]) -> list[dict[str, Any]]:
    """Return, by target, which entries of a model only the fallback takes, and their share of its work; nothing where there are none."""
    declaration = declare(root)
    archs = {target: load_arch(root, name) for target, name in declaration.targets}
    groups: dict[str, list[Call]] = {}
    for workload in declaration.workloads:
        calls = calls_of(workload.tags).get(model, 0)
        found = next((found for function, found in functions.items() if function.is_computed_by(workload.rule, workload.attrs)), None)
        if not calls or found is None or found["space"] is None:
            continue
        is_fallback = _is_left_to_fallback(root, workload, archs[workload.target], space_from_json(found["space"]))
        call = Call(workload.name, calls, found["work"]["flops"], found["work"]["bytes"], is_fallback=is_fallback)
        groups.setdefault(workload.target, []).append(call)
    shares = [{"target": target, "model": model, **share(calls)} for target, calls in groups.items()]
    return [found for found in shares if found["fallbacks"]]


def _is_left_to_fallback(root: Path, workload: Workload, arch: Arch, space: IterSpace) -> bool:
    policies = (load_module("policies", root, name) for name in ranking_policies(root, workload.policy, arch.kind))
    proposals = (proposal for policy in policies for proposal in policy.propose(space, arch, 1))
    return all(proposal.candidate.template in FALLBACKS for proposal in proposals)
