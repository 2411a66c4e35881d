"""Owns a learned cost model: features of candidates and computations, training on measurements, the choice of the next batch.

Knows nothing of templates: a parameter is a number, a truth value or a word. AutoTVM's scheme (Chen et al., Learning to Optimize Tensor
Programs, NeurIPS 2018): a model that ranks, trained again for each batch, and a batch that is greedy but for a share epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kerneldecl.errors import TuningError
from kerneldecl.model import Arch, Candidate, IterSpace, Proposal, Trial, Value, dtype_bytes
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.policies.shared.traffic import moved_bytes, points
from kerneldecl.policies.shared.tuning import BATCH, not_tried, shuffled
from kerneldecl.store.keys import lines_of
from kerneldecl.store.local import LocalStore
from kerneldecl.store.results import Lowered, TuneResult

MOST_SCORED = 8192
"""Candidates of a space that are scored at most: the model's own choice of many more is as good."""
LEAST_TRAINED = 8
"""Timed candidates below which nothing is learned."""
ROUNDS = 120
_PARAMS = {
    "objective": "rank:pairwise",
    "lambdarank_pair_method": "mean",
    "lambdarank_num_pair_per_sample": 8,
    "max_depth": 6,
    "eta": 0.15,
    "min_child_weight": 0.1,
    "nthread": 1,  # of few hundred rows, more threads wait for each other
}

Features = Mapping[str, float]


class Timed(NamedTuple):
    """What was measured of one computation: features of each candidate, and the share of the best's speed that it reaches."""

    rows: tuple[Features, ...]
    shares: tuple[float, ...]


def ask(
    search: SearchSpace, options: Any, trials: Sequence[Trial], *, spec: Mapping[str, Any], is_over: bool = False
) -> tuple[Proposal, ...]:
    """Return the next batch: most of it what the model ranks first, the rest drawn; the policy's order while nothing is learned."""
    if is_over:
        return ()
    drawn = shuffled(search.candidates, options.seed)
    share = max(1, round(options.epsilon * BATCH)) if options.epsilon else 0
    groups = [*_history(spec, search.arch), *filter(None, [_timed(search.space, trials, search.predicted.values())])]
    if sum(len(group.rows) for group in groups) < LEAST_TRAINED:
        first = [each.candidate for each in search.ranked]
    else:
        first = _ranked(search, groups, drawn, {trial.candidate for trial in trials}, options.seed)
    greedy = not_tried(search, (*first, *drawn), trials, BATCH - share)
    chosen = {proposal.candidate for proposal in greedy}
    return (*greedy, *not_tried(search, (each for each in drawn if each not in chosen), trials, share))


def _ranked(search: SearchSpace, groups: Sequence[Timed], drawn: Sequence[Candidate], tried: set[Candidate], seed: int) -> list[Candidate]:
    """Return candidates, first those that the model expects to be fastest."""
    some = dict.fromkeys((*(each.candidate for each in search.ranked[: MOST_SCORED // 2]), *drawn[:MOST_SCORED]))
    waiting = [candidate for candidate in some if candidate not in tried][:MOST_SCORED]
    predicted, of_space = search.predicted, _of_space(search.space)
    slowest, least = max(predicted.values(), default=1.0), _least(predicted.values())
    rows = [{**of_space, **_of_candidate(each, predicted.get(each, slowest), least)} for each in waiting]
    scores = _scores(groups, rows, seed)
    return [candidate for _, candidate in sorted(zip(scores, waiting, strict=True), key=lambda pair: -pair[0])]


def _scores(groups: Sequence[Timed], rows: Sequence[Features], seed: int) -> list[float]:
    """Train on groups and return the score of each row, higher for what is faster; raise TuningError where XGBoost is not installed."""
    try:
        import numpy as np
        import xgboost
    except ModuleNotFoundError as error:
        raise TuningError(f"policy cost_model needs {error.name}: pip install 'kerneldecl[search]'") from None
    if not rows:
        return []
    names = sorted({name for group in groups for row in group.rows for name in row})

    def matrix(several: Iterable[Features]) -> Any:
        return np.array([[row.get(name, math.nan) for name in names] for row in several], dtype="float32")

    data = xgboost.DMatrix(
        matrix(row for group in groups for row in group.rows),
        label=np.array([share for group in groups for share in group.shares]),
        qid=np.repeat(np.arange(len(groups)), [len(group.rows) for group in groups]),
    )
    booster = xgboost.train({**_PARAMS, "seed": seed}, data, num_boost_round=ROUNDS)
    return [float(score) for score in booster.predict(xgboost.DMatrix(matrix(rows)))]


def _history(spec: Mapping[str, Any], arch: Arch) -> Iterator[Timed]:
    """Yield what the store's tune records know of candidates on devices of this kind, one group for each record of a known computation.

    Times are compared within a group alone, so those of another device teach as well which candidates go before which.
    """
    store, sides = LocalStore(Path(spec["cache"])), (False, True) if arch.is_detected else (False,)
    lowered = (Lowered(record.result) for side in sides for record in store.all("lower", is_local=side))
    spaces = {each.computation: each for each in lowered}
    for record in (record for side in sides for record in store.all("tune", is_local=side)):
        result = TuneResult(record.key, record.result)
        if lines_of(record.manifest).get("arch.kind", "").strip('"') != arch.kind or result.computation not in spaces:
            continue
        if found := _timed(spaces[result.computation].space, result.trials):
            yield found


def _timed(space: IterSpace, trials: Sequence[Trial], predicted: Iterable[float] = ()) -> Timed | None:
    """Return what trials say of a computation's candidates; None where there is nothing to compare.

    `predicted` are the times that the policy's model expects of all of its candidates, where they are known: else those of the trials.
    """
    timed = [trial for trial in trials if trial.samples and trial.candidate.params]
    if len(timed) < 2:
        return None
    best, of_space = min(trial.run_secs for trial in timed), _of_space(space)
    least = _least((*predicted, *(trial.predicted_secs for trial in trials)))
    rows = tuple({**of_space, **_of_candidate(trial.candidate, trial.predicted_secs, least)} for trial in timed)
    return Timed(rows, tuple(best / trial.run_secs for trial in timed))


def _of_space(space: IterSpace) -> dict[str, float]:
    """Return what describes a computation: its work, and the extents of its largest block."""
    main = max(space.blocks, key=points)
    found = {"points": _log(points(main)), "bytes": _log(moved_bytes(space)), "blocks": float(len(space.blocks))}
    found |= {"reads": float(len(main.reads)), "element_bytes": float(dtype_bytes(main.writes[0].dtype))}
    for kind in ("spatial", "reduce"):
        extents = [axis.extent for axis in main.axes if axis.kind == kind]
        found |= {f"{kind}[{place}]": _log(extent) for place, extent in enumerate(reversed(extents))}
    return found


def _least(predicted: Iterable[float]) -> float:
    return min((secs for secs in predicted if secs > 0), default=1.0)


def _of_candidate(candidate: Candidate, predicted_secs: float, least_secs: float) -> dict[str, float]:
    """Return what describes a candidate: its template, its parameters, and how far behind its first choice the policy's model has it.

    The expected time itself says nothing of another computation, whose times are others.
    """
    behind = math.log(predicted_secs / least_secs) if predicted_secs > 0 else math.nan
    found = {f"is {candidate.template}": 1.0, "behind": behind}
    for name, value in candidate.params:
        found |= _of_value(f"{candidate.template}.{name}", value)
    return found


def _of_value(name: str, value: Value) -> dict[str, float]:
    if isinstance(value, tuple):
        return {key: number for place, item in enumerate(value) for key, number in _of_value(f"{name}[{place}]", item).items()}
    return {f"{name}={value}": 1.0} if isinstance(value, str) else {name: _log(value)}


def _log(value: float) -> float:
    return math.log2(1 + max(0, value))
