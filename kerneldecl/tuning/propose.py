"""Owns the actions of a worker that asks policies: what they propose, and what they propose next.

Knows nothing of TVM, of how candidates are built or of who asks. A policy is the user's code: it runs in a worker, within limits.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kerneldecl.errors import TuningError
from kerneldecl.limits import BUDGET
from kerneldecl.model import Arch, Candidate, IterSpace, Proposal, frozen
from kerneldecl.plugins.find import plugin_file
from kerneldecl.plugins.load import blamed, load_module
from kerneldecl.plugins.policy_order import ranking_policies
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.policies.shared.tuning import Idea, Recorded
from kerneldecl.runners.worker import imported
from kerneldecl.serial import arch_from_json, space_from_json, trial_from_json
from kerneldecl.store.results import Proposed, groups_to_json

Json = Mapping[str, Any]


def propose(
    root: str, policies: Sequence[Any], space: Json, arch: Json, top_k: int, recorded: Sequence[Sequence[Json]] = ()
) -> dict[str, Any]:
    """Return what each policy proposes for a computation, as a propose record holds it; policies that propose nothing are left out.

    `policies` are the items of the entry's list: the names that each stands for, and a tuner's options or null. `recorded` are
    configurations of like computations with their sources, nearest first, for tuners that read records.
    """
    parsed = space_from_json(space), arch_from_json(arch), top_k
    known = tuple(Recorded(Candidate.from_json(candidate), source) for candidate, source in recorded)
    groups: list[Proposed] = []
    for turn, (names, options) in enumerate(policies):
        if options is None:
            groups += _of_policies(Path(root), names, turn, parsed)
            continue
        try:
            tuner = load_module("policies", Path(root), names[0])
            if hasattr(tuner, "ideas"):
                groups += _of_records(Path(root), names[0], turn, options, (parsed, known))
            else:
                groups += _of_tuner(Path(root), names[0], turn, options, parsed)
        except TuningError as error:
            return {"failure": f"policy {names[0]}: {error}"}
    if not groups and len(policies) == 1 and policies[0][1] is not None and hasattr(load_module("policies", Path(root), names[0]), "ideas"):
        return {"failure": f"policy {names[0]}: no record tells of a computation like it; name another policy behind it"}
    return groups_to_json(groups)


def _of_policies(root: Path, names: Sequence[str], turn: int, parsed: tuple[IterSpace, Arch, int]) -> Iterator[Proposed]:
    for name in names:
        policy = load_module("policies", root, name)
        proposals = _checked(root, name, policy, "propose", parsed)
        if proposals:
            yield Proposed(name, proposals, hasattr(policy, "propose_next"), turn)


def _of_tuner(root: Path, name: str, turn: int, options: Sequence[Any], parsed: tuple[IterSpace, Arch, int]) -> Iterator[Proposed]:
    """Yield what a tuner lists at once, or that it is to be asked with measurements; nothing where there is nothing to search."""
    tuner, search = load_module("policies", root, name), _search_space(root, *parsed)
    given = {key: frozen(value) for key, value in options}
    completed = _options_json(tuner, given)
    listed = _checked(root, name, tuner, "configurations", (search, _options(tuner, completed))) if hasattr(tuner, "configurations") else ()
    templates = getattr(tuner, "TEMPLATES", None) or search.templates
    if listed:
        yield Proposed(name, listed, searches=False, turn=turn, options=_of_list(completed))
    elif templates and not hasattr(tuner, "configurations"):
        yield Proposed(name, (), searches=True, turn=turn, options=completed, templates=templates)


def _of_records(
    root: Path, name: str, turn: int, options: Sequence[Any], given: tuple[tuple[IterSpace, Arch, int], tuple[Recorded, ...]]
) -> Iterator[Proposed]:
    """Yield what a tuner makes of records, each candidate with its source; nothing where no record helps."""
    parsed, recorded = given
    tuner, search = load_module("policies", root, name), _search_space(root, *parsed)
    completed = _options_json(tuner, {key: frozen(value) for key, value in options})
    ideas: tuple[Idea, ...] = _checked(root, name, tuner, "ideas", (search, _options(tuner, completed), recorded))
    if ideas:
        sources = [idea.source for idea in ideas]
        yield Proposed(name, [idea.proposal for idea in ideas], False, turn, _of_list(completed), sources=sources)


def _of_list(options: Json) -> Json | None:
    """Return what of a tuner's options counts beside its list: limits, and by what it is keyed; None where there is neither."""
    return {name: options[name] for name in (*BUDGET, "key") if options.get(name)} or None


def _options(tuner: ModuleType, options: Mapping[str, Any]) -> Any:
    return tuner.Options(**{name: frozen(value) for name, value in options.items() if name not in BUDGET})


def _options_json(tuner: ModuleType, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tuner's options with every default, and its budget."""
    budget = {"trials": tuner.TRIALS} if tuner.TRIALS else {}
    completed = dataclasses.asdict(_options(tuner, given))
    return {**completed, **budget, **{name: value for name, value in given.items() if name in BUDGET}}


def propose_next(root: str, policy: str, asked: Mapping[str, Any], trials: Sequence[Json]) -> dict[str, Any]:
    """Return what a policy that searches proposes next, given its trials; `asked` are space, arch and top_k."""
    arguments = space_from_json(asked["space"]), arch_from_json(asked["arch"]), asked["top_k"], [trial_from_json(t) for t in trials]
    proposals = _checked(Path(root), policy, load_module("policies", Path(root), policy), "propose_next", arguments)
    return groups_to_json([Proposed(policy, proposals, searches=True)])


def ask(root: str, policy: str, options: str, asked: Json, trials: Sequence[Json], *, is_over: bool = False) -> dict[str, Any]:
    """Return what a tuner proposes next, given all trials so far; nothing where its search is over, which it is only told.

    `options` are its options as JSON; `asked` are space, arch, top_k, and the spec of the workload where TVM has to lower it.
    """
    tuner, arch = load_module("policies", Path(root), policy), arch_from_json(asked["arch"])
    search = _search_space(Path(root), space_from_json(asked["space"]), arch, asked["top_k"])
    known, given = [trial_from_json(trial) for trial in trials], _options(tuner, json.loads(options))
    proposals: Sequence[Proposal] = ()
    try:
        if engine := getattr(tuner, "ENGINE", ""):
            proposals = imported(engine).ask(search, given, known, spec=asked["spec"], is_over=is_over)
        elif not is_over:
            proposals = _checked(Path(root), policy, tuner, "ask", (search, given, known))
    except TuningError as error:
        return {"failure": f"policy {policy}: {error}"}
    return groups_to_json([Proposed(policy, proposals, searches=True)])


@functools.lru_cache(maxsize=1)
def _search_space(root: Path, space: IterSpace, arch: Arch, top_k: int) -> SearchSpace:
    """Return what tuners search: the spaces of the policies of `auto`. It is kept while one entry is searched."""
    names = ranking_policies(root, "auto", arch.kind)
    return SearchSpace(space, arch, top_k, tuple((name, load_module("policies", root, name)) for name in names))


_OF_TUNERS = ("configurations", "ideas", "ask")


def _checked(root: Path, name: str, policy: ModuleType, function: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call a policy; raise DeclarationError, with file and line, for what it raises and for an answer that is no list of proposals.

    A tuner's TuningError is a sentence about what was declared, and stays one.
    """
    file = plugin_file("policies", root, name)
    refused: list[TuningError] = []
    proposals: tuple[Any, ...] = ()
    with blamed(file, root, f"{function}() of policy {name} fails"):
        try:
            proposals = tuple(getattr(policy, function)(*arguments))
        except TuningError as error:
            if function not in _OF_TUNERS:
                raise
            refused.append(error)
        for proposal in (each.proposal if isinstance(each, Idea) else each for each in proposals):
            if not isinstance(proposal, Proposal):
                msg = f"it gives a {type(proposal).__name__} among its proposals"
                raise TypeError(msg)
            plugin_file("templates", root, proposal.candidate.template)
    if refused:
        raise refused[0]
    return proposals
