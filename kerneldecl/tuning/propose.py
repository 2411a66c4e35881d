"""Owns the actions of a worker that asks policies: what they propose, and what they propose next.

Knows nothing of TVM, of how candidates are built or of who asks. A policy is the user's code: it runs in a worker, within limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kerneldecl.model import Proposal
from kerneldecl.plugins.find import plugin_file
from kerneldecl.plugins.load import blamed, load_module
from kerneldecl.serial import arch_from_json, space_from_json, trial_from_json
from kerneldecl.store.results import groups_to_json

Json = Mapping[str, Any]


def propose(root: str, policies: Sequence[str], space: Json, arch: Json, top_k: int) -> dict[str, Any]:
    """Return what each policy proposes for a computation, as a propose record holds it; policies that propose nothing are left out."""
    parsed = space_from_json(space), arch_from_json(arch), top_k
    groups = []
    for name in policies:
        policy = load_module("policies", Path(root), name)
        proposals = _checked(Path(root), name, policy, "propose", parsed)
        if proposals:
            groups.append((name, proposals, hasattr(policy, "propose_next")))
    return groups_to_json(groups)


def propose_next(root: str, policy: str, asked: Mapping[str, Any], trials: Sequence[Json]) -> dict[str, Any]:
    """Return what a policy that searches proposes next, given its trials; `asked` are space, arch and top_k."""
    arguments = space_from_json(asked["space"]), arch_from_json(asked["arch"]), asked["top_k"], [trial_from_json(t) for t in trials]
    proposals = _checked(Path(root), policy, load_module("policies", Path(root), policy), "propose_next", arguments)
    return groups_to_json([(policy, proposals, True)])


def _checked(root: Path, name: str, policy: ModuleType, function: str, arguments: tuple[Any, ...]) -> tuple[Proposal, ...]:
    """Call a policy; raise DeclarationError, with file and line, for what it raises and for an answer that is no list of proposals."""
    file = plugin_file("policies", root, name)
    with blamed(file, root, f"{function}() of policy {name} fails"):
        proposals = tuple(getattr(policy, function)(*arguments))
        for proposal in proposals:
            if not isinstance(proposal, Proposal):
                msg = f"it gives a {type(proposal).__name__} among its proposals"
                raise TypeError(msg)
            plugin_file("templates", root, proposal.candidate.template)
    return proposals
