"""Owns the tests of tuners as functions of a search space and of trials, and of search spaces.

Knows nothing of builds: times are made up.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
from support.cpus import AVX2, AVX512, runnable
from support.iter_spaces import H200, matmul

from kerneldecl.errors import TuningError
from kerneldecl.model import Arch, Candidate, Proposal, Trial
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_module
from kerneldecl.plugins.policy_order import ranking_policies
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.policies.shared.tuning import Recorded

CPU = runnable(AVX512)


def space_of(m: int, n: int, k: int, arch: Arch = CPU, dtype: str = "float32") -> SearchSpace:
    names = ranking_policies(STANDARD, "auto", arch.kind)
    return SearchSpace(matmul((m, n, k), dtype=dtype), arch, 20, tuple((name, load_module("policies", STANDARD, name)) for name in names))


SPACE = space_of(64, 96, 48)


def tuner(name: str) -> Any:
    return importlib.import_module(f"kerneldecl.policies.{name}")


def secs_of(candidate: Candidate) -> float:
    """Return a made-up time: the further from one point of the space, the longer."""
    params = dict(candidate.params)
    if candidate.template != "cpu_matmul":
        return 1e-3
    distance = abs(int(params["tile_m"]) - 7) + abs(int(params["tile_n"]) - 48) / 16  # type: ignore[arg-type]  # whole numbers
    return 1e-5 * (1 + distance + bool(params["pack_m"]) + bool(params["pack_n"]) + (params["order"] == "mn"))


def trial_of(proposal: Proposal) -> Trial:
    return Trial(proposal.candidate, proposal.predicted_secs, error=0.0, samples=(secs_of(proposal.candidate),))


def run(name: str, most: int, before: Sequence[Trial] = (), search: SearchSpace = SPACE, **options: Any) -> list[Trial]:
    """Return the trials of a tuner that may try so many, given others' trials."""
    module, trials = tuner(name), list[Trial]()
    while len(trials) < most and (found := module.ask(search, module.Options(**options), [*before, *trials])):
        trials += map(trial_of, found[: most - len(trials)])
    return trials


@pytest.mark.parametrize("name", ["exhaustive", "random", "evolution"])
def test_a_tuner_tries_every_candidate_once_if_it_may(name: str) -> None:
    small = space_of(4, 16, 8, runnable(AVX2))
    tried = [trial.candidate for trial in run(name, 10**6, search=small)]
    assert len(tried) == len(set(tried))
    assert set(tried) == set(small.candidates)


@pytest.mark.parametrize("name", ["exhaustive", "random", "evolution"])
def test_what_others_have_tried_is_not_tried_again(name: str) -> None:
    before = run("random", 50, seed=9)
    assert not {trial.candidate for trial in before} & {trial.candidate for trial in run(name, 40, before)}


@pytest.mark.parametrize("name", ["random", "evolution"])
def test_a_seed_determines_a_search_and_another_gives_another(name: str) -> None:
    first, again, other = ([trial.candidate for trial in run(name, 60, seed=seed)] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_random_draws_the_same_first_candidates_however_many_it_may_try() -> None:
    assert run("random", 40, seed=3)[:24] == run("random", 24, seed=3)


def test_evolution_finds_what_is_fastest_with_fewer_trials_than_drawing_does() -> None:
    least = min(map(secs_of, SPACE.candidates))

    def trials_until_found(name: str, seed: int) -> int:
        secs = [trial.run_secs for trial in run(name, 240, seed=seed)]
        return secs.index(least) if least in secs else len(secs)

    bred, drawn = (sum(trials_until_found(name, seed) for seed in range(3)) for name in ("evolution", "random"))
    assert bred < drawn / 2


def test_evolution_starts_with_what_the_policy_ranks_first_and_breeds_what_others_have_measured() -> None:
    ranked = [proposal.candidate for proposal in SPACE.ranked]
    assert [trial.candidate for trial in run("evolution", 8)] == ranked[:8]
    best = min(SPACE.candidates, key=secs_of)
    near = run("evolution", 16, [trial_of(Proposal(best, 1e-5))])
    assert sum(trial.run_secs for trial in near) < sum(trial.run_secs for trial in run("random", 16))


def test_a_grid_is_the_part_of_the_space_with_its_values() -> None:
    tried = run("grid", 10**6, values=(("order", ("nm",)), ("tile_m", (3, 4))))
    assert {trial.candidate for trial in tried} == {
        candidate
        for candidate in SPACE.candidates
        if {"tile_m", "order"} <= dict(candidate.params).keys()
        and dict(candidate.params)["tile_m"] in (3, 4)
        and dict(candidate.params)["order"] == "nm"
    }
    assert tried


@pytest.mark.parametrize(
    ("values", "sentence"),
    [((("tile_x", (1,)),), "no template of cpu_matmul has the parameter tile_x"), ((("tile_m", (1000,)),), "tile_m is none of")],
)
def test_a_grid_without_a_point_says_why(values: Any, sentence: str) -> None:
    with pytest.raises(TuningError, match=sentence):
        run("grid", 1, values=values)


def configured(**options: Any) -> list[Candidate]:
    module = tuner("configs")
    return [proposal.candidate for proposal in module.configurations(SPACE, module.Options(**options))]


def test_a_configuration_is_completed_by_the_best_ranked_candidate_that_has_its_values() -> None:
    (found,) = configured(configs=((("template", "cpu_matmul"), ("tile_m", 5), ("tile_n", 32)),))
    ranked = [p.candidate for p in SPACE.ranked if {("tile_m", 5), ("tile_n", 32)} <= set(p.candidate.params)]
    every = [each for each in SPACE.candidates if {("tile_m", 5), ("tile_n", 32)} <= set(each.params)]
    assert found == (ranked or every)[0]


def test_a_grid_of_configurations_is_all_combinations() -> None:
    found = configured(grid=(("template", "cpu_matmul"), ("tile_m", (3, 4)), ("tile_n", (16, 32))))
    assert [(dict(each.params)["tile_m"], dict(each.params)["tile_n"]) for each in found] == [(3, 16), (3, 32), (4, 16), (4, 32)]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            (("template", "cpu_window"),),
            r"configs\[0\] names template cpu_window, which does not fit this computation; those that do:",
        ),
        ((("template", "cpu_matmul"), ("tile_q", 1)), r"configs\[0\] fits no template: cpu_matmul has no parameter tile_q, but block_k"),
        (
            (("template", "cpu_matmul"), ("tile_m", 999)),
            r"configs\[0\] fits no candidate of cpu_matmul for this computation",
        ),
    ],
)
def test_a_configuration_that_fits_no_template_says_why(config: Any, sentence: str) -> None:
    with pytest.raises(TuningError, match=sentence):
        configured(configs=(config,))


@pytest.mark.parametrize(("m", "n", "k"), [(64, 96, 48), (33, 17, 5), (1, 64, 64)])
def test_a_space_holds_all_that_its_policy_ranks(m: int, n: int, k: int) -> None:
    search = space_of(m, n, k)
    assert {proposal.candidate for proposal in search.ranked} <= set(search.candidates)
    assert len(set(search.candidates)) == len(search.candidates)


def test_a_space_is_wider_than_what_the_model_keeps() -> None:
    assert len(SPACE.candidates) > 2 * len(SPACE.ranked)
    gpu = space_of(1024, 1024, 1024, H200, "float16")
    assert {"gpu_matmul_tc", "wgmma_matmul"} <= set(gpu.templates)


OTHER_SHAPE = space_of(128, 192, 48)
"""Of the same operator as SPACE, larger."""


def recorded(search: SearchSpace, count: int, key: str = "record") -> list[Recorded]:
    """Return the fastest candidates of another shape, as a record has them."""
    return [Recorded(candidate, {"record": key}) for candidate in sorted(search.candidates, key=secs_of)[:count]]


def secs_that_no_model_expects(candidate: Candidate) -> float:
    """Return a made-up time that is least for tiles that the policy ranks low, whatever the shape."""
    params = dict(candidate.params)
    distance = abs(int(params["tile_m"]) - 3) + abs(int(params["tile_n"]) - 16) / 16  # type: ignore[arg-type]  # whole numbers
    return 1e-5 * (1 + distance + (not params["pack_m"]) + (not params["pack_n"]) + (params["order"] == "nm"))


def test_a_search_that_starts_from_the_nearest_record_measures_a_fraction_of_what_one_without_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "secs_of", secs_that_no_model_expects)
    nearest = tuner("nearest")
    fastest = min(map(secs_of, OTHER_SHAPE.candidates))
    ideas = nearest.ideas(OTHER_SHAPE, nearest.Options(count=2), recorded(SPACE, 8))
    warm = [trial_of(idea.proposal) for idea in ideas]
    cold = run("evolution", 400, search=OTHER_SHAPE)

    def measured_until_found(trials: Sequence[Trial]) -> int:
        return next((count for count, trial in enumerate(trials, start=1) if trial.run_secs <= fastest), len(trials) + 1)

    assert len(warm) <= 2
    assert 10 * measured_until_found(warm) <= measured_until_found(cold)


def test_a_configuration_of_another_shape_becomes_the_candidate_most_like_it_with_its_source() -> None:
    nearest = tuner("nearest")
    outside = next(each for each in OTHER_SHAPE.candidates[::-1] if each not in SPACE.candidates)
    (idea,) = nearest.ideas(SPACE, nearest.Options(), [Recorded(outside, {"record": "there"})])
    found = idea.proposal.candidate
    assert found in SPACE.candidates
    assert nearest.distance(found, outside) == min(nearest.distance(each, outside) for each in SPACE.candidates) > 0
    assert idea.source == {"record": "there"}


def test_parameters_differ_by_the_logarithm_of_sizes_and_words_by_much() -> None:
    distance = tuner("nearest").distance

    def of(**params: Any) -> Candidate:
        return Candidate.of("t", params)

    assert distance(of(m=7, w="a"), of(m=7, w="a")) == 0
    assert distance(of(m=7), of(m=15)) == distance(of(m=15), of(m=7)) == 1
    assert distance(of(m=0), of(m=1)) == 1
    assert distance(of(w="a"), of(w="b")) == distance(of(p=True), of(p=False)) == distance(of(), of(m=1)) == 8


def test_configurations_are_taken_in_their_order_each_once_and_those_of_no_template_of_the_space_not_at_all() -> None:
    nearest = tuner("nearest")
    first, second, third = recorded(SPACE, 3)
    foreign = Recorded(Candidate.of("gpu_matmul_tc", {"block_m": 64}), {"record": "gpu"})
    found = nearest.ideas(SPACE, nearest.Options(count=2), [foreign, first, first, second, third])
    assert [idea.proposal.candidate for idea in found] == [first.candidate, second.candidate]
    assert nearest.ideas(SPACE, nearest.Options(), ()) == ()
