"""Owns what can be said of fallbacks before anything is tuned: the entries of a model that no policy but the fallback takes.

Knows nothing of how a model is read. Workers lower the entries; policies are asked here, as a build asks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kerneldecl.declare.document import declare
from kerneldecl.model import FALLBACKS, Arch, IterSpace, Workload
from kerneldecl.planning.fallbacks import Call, calls_of, share
from kerneldecl.plugins.load import load_arch, load_module
from kerneldecl.plugins.policy_order import policies_behind
from kerneldecl.runners.local import LocalRunner, in_order
from kerneldecl.store.results import Lowered

LIMIT_SECS = 120.0
JOBS = 2
"""Workers: they take longer to start than to lower a model's entries."""


def expected_fallbacks(root: Path, model: str) -> list[dict[str, Any]]:
    """Return, by target, which entries of a model only the fallback takes, and their share of its work; nothing where there are none."""
    declaration = declare(root)
    archs = {target: load_arch(root, name) for target, name in declaration.targets}
    entries = [workload for workload in declaration.workloads if model in calls_of(workload.tags)]
    requests = [{"action": "lower", "root": str(root), "rule": each.rule, "attrs": dict(each.attrs)} for each in entries]
    with LocalRunner(JOBS, 1) as runner:
        lowered = in_order(runner.run_all(requests, LIMIT_SECS), len(requests))
    groups: dict[str, list[Call]] = {}
    for workload, answer in zip(entries, lowered, strict=True):
        if "failure" not in answer:
            groups.setdefault(workload.target, []).append(_call(root, workload, archs[workload.target], (model, answer)))
    shares = [{"target": target, "model": model, **share(calls)} for target, calls in groups.items()]
    return [found for found in shares if found["fallbacks"]]


def _call(root: Path, workload: Workload, arch: Arch, known: tuple[str, Mapping[str, Any]]) -> Call:
    model, lowered = known[0], Lowered(known[1])
    return Call(
        name=workload.name,
        calls=calls_of(workload.tags)[model],
        flops=lowered.flops,
        least_bytes=lowered.least_bytes,
        is_fallback=_is_left_to_fallback(root, workload, arch, lowered.space),
    )


def _is_left_to_fallback(root: Path, workload: Workload, arch: Arch, space: IterSpace) -> bool:
    policies = (load_module("policies", root, name) for name in policies_behind(root, workload.policy, arch.kind))
    proposals = (proposal for policy in policies for proposal in policy.propose(space, arch, 1))
    return all(proposal.candidate.template in FALLBACKS for proposal in proposals)
