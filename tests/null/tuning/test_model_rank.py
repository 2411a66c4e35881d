"""The recorded times judge the order in which policies propose candidates."""

from __future__ import annotations

from typing import Any

from kerneldecl.model import Candidate, Proposal
from kerneldecl.store.keys import key
from kerneldecl.store.local import Record
from kerneldecl.store.results import Group, Proposed, groups_from_json, groups_to_json
from kerneldecl.tuning.model_rank import Change, ModelRank, TimedEarlier, model_rank, rank_of_order, worse

A, B, C, D = (Candidate.of("tiles", {"size": size}) for size in (8, 16, 32, 64))
SECS = {A: 2e-6, B: 4e-6, C: 1e-6}


def test_the_curve_is_the_fastest_by_the_best_so_far() -> None:
    assert rank_of_order("p", [B, A, C], SECS) == ModelRank("p", rank=3, timed=3, proposed=3, shares=(0.25, 0.5, 1.0))


def test_what_was_not_timed_takes_no_place() -> None:
    assert rank_of_order("p", [D, C, A], SECS) == ModelRank("p", rank=1, timed=2, proposed=3, shares=(1.0, 1.0))
    assert rank_of_order("p", [D], SECS) is None


def test_an_order_without_the_fastest_does_not_reach_one() -> None:
    rank = rank_of_order("p", [B, A], SECS)
    assert rank is not None
    assert (rank.rank, rank.shares, rank.share(20)) == (3, (0.25, 0.5), 0.5)


def test_times_hold_for_whatever_list_of_candidates_and_templates() -> None:
    """An edited policy has another list, another key and no record of its own: its order is judged by the times of the old one."""
    listed = _group([A, C])
    earlier = TimedEarlier([_tuned({A: 2e-6, C: 1e-6}, listed), _tuned({B: 4e-6}, _group([B]))], [_proposed([A, C])])
    timed = earlier.of(_manifest("other", "another digest"))
    assert timed.secs == SECS
    assert [group.digest for group in timed.groups] == [listed.digest]
    assert model_rank(_group([C, B]), timed.secs) == ModelRank("p", 1, 2, 2, (1.0, 1.0))
    assert earlier.of(_manifest("other", "d", protocol="another")).secs == {}


def test_worse_orders_are_told_by_their_means() -> None:
    good, bad = ModelRank("p", 1, 2, 2, (1.0, 1.0)), ModelRank("p", 2, 2, 2, (0.9, 1.0))
    assert worse([Change("x", good, good), Change("y", bad, bad)], 0.002) == []
    assert worse([Change("x", bad, good), Change("y", good, bad)], 0.002) == [], "one entry gains what another loses"
    assert worse([Change("x", good, good), Change("y", good, bad)], 0.002) == ["best of 1: 0.9487 of the fastest, 1.0000 before"]
    assert worse([], 0.002) == []


def _group(candidates: list[Candidate]) -> Group:
    return groups_from_json(_proposals(candidates))[0]


def _proposals(candidates: list[Candidate]) -> dict[str, Any]:
    return groups_to_json([Proposed("p", [Proposal(each, 1e-6) for each in candidates], searches=False)])


def _proposed(candidates: list[Candidate]) -> Record:
    return Record("0" * 64, "", _proposals(candidates))


def _manifest(templates: str, listed: str, protocol: str = "cold") -> str:
    lines = {"computation": "c", "arch.model": "GPU", "search.generation": 0, "search.protocol": protocol}
    texts = [f'{name} = "{value}"' for name, value in {**lines, "templates.tiles": templates, "candidates.1.p": f"2 {listed}"}.items()]
    return "\n".join(texts) + "\n"


def _tuned(secs: dict[Candidate, float], group: Group) -> Record:
    manifest = _manifest("template", group.digest)
    trials = [{"candidate": each.to_json(), "predicted_secs": 1e-6, "samples": [value]} for each, value in secs.items()]
    return Record(key(manifest), manifest, {"policy": "p", "trials": trials})
