"""Owns the choice among kernels by the number of rows of a call: they are verified and timed at the tuned numbers and between them.

Knows nothing of plans, records or artifacts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneldecl.rows import Rows
from kerneldecl.runners.failures import is_short_of_memory
from kerneldecl.runners.process import Answer
from kerneldecl.runners.verdict import judged
from kerneldecl.timing import median, raced
from kerneldecl.tuning.measure import rounded
from kerneldecl.tuning.race import budget_of, calls_in
from kerneldecl.tuning.task import PREPARE_SECS, VERIFY_SECS, Runner, Task

STEP = 1.13
"""Ratio of neighbouring numbers of rows at which kernels are timed, about: half of what lies between the numbers of two of them."""
UNIT = 8
"""Rows that such a number between is a multiple of at least, from twice as many on: widths of tiles are."""
MOST_WITHIN = 3
"""Numbers at most at which kernels are timed between those of two kernels."""
ROUNDS = 7
"""Samples of each kernel at each number of rows, in turns."""
TIE = 0.01
"""Share of its time by which a kernel must be faster than one that is tuned for a nearer number."""
NEIGHBOURS = 4
"""Kernels of smaller and of larger numbers that compete at each: behind the end of a wave of tiles, one may be the best whose tiles fill a
wave of far fewer rows."""
SLOWDOWN = 1.5
"""Ratio to the shortest first run above which a kernel is not timed in turns."""


@dataclass(frozen=True)
class RowsKernel:
    """One kernel of several, by the number of rows that it is tuned for."""

    tuned: int
    library: Path
    symbol: str

    def takes(self, rows: int) -> bool:
        """Say whether it takes a number of rows: one that is tuned for a single row takes no other."""
        return self.tuned > 1 or rows == 1


@dataclass(frozen=True)
class Chosen:
    """Which kernel takes which numbers of rows."""

    ranges: tuple[tuple[int, int], ...]
    """The last number of each range, ascending, and that which its kernel is tuned for."""
    secs: Mapping[int, Mapping[int, float]]
    """Seconds of a call with so many rows, by what the kernel is tuned for."""
    verified: tuple[int, ...]
    """Numbers of rows at which results were compared with the reference."""


def timed_rows(tuned: Sequence[int], upto: int) -> list[int]:
    """Return the numbers of rows at which kernels are timed: those of the kernels, the most, and others where these are far apart.

    What is the fastest at one takes those down to the one before, so others are round: their tiles are full, and those of fewer rows
    at most as many.
    """
    bounds = sorted({1, *tuned, upto})
    found = set(bounds)
    for low, high in itertools.pairwise(bounds):
        steps = min(MOST_WITHIN + 1, round(math.log(high / low) / math.log(STEP)))
        found |= {_rounded(low * (high / low) ** (step / steps)) for step in range(1, steps)}
    return sorted(found)


def _rounded(number: float) -> int:
    """Return the nearest multiple of an eighth of the power of two below a number."""
    unit = max(UNIT, 1 << (int(number).bit_length() - 4)) if number >= 2 * UNIT else 1
    return round(number / unit) * unit


def by_tuned(kernels: Sequence[RowsKernel], rows: Rows) -> Chosen:
    """Return what is chosen where nothing can be measured: each kernel takes the numbers up to its own, the last one all that follow."""
    general = [kernel.tuned for kernel in kernels if kernel.takes(2)]
    last = [(rows.upto, general[-1])]
    return Chosen((*((kernel.tuned, kernel.tuned) for kernel in kernels if kernel.tuned < general[-1]), *last), {}, ())


def choose(task: Task, kernels: Sequence[RowsKernel], rows: Rows, runner: Runner) -> Chosen | str:
    """Return which kernel is the fastest right one at which numbers of rows; or why there is none somewhere, as a sentence.

    The kernel that is chosen at one of the timed numbers takes those down to the one before.
    """
    best: list[tuple[int, int]] = []
    secs: dict[int, dict[int, float]] = {}
    verified: set[int] = set()
    numbers = timed_rows([kernel.tuned for kernel in kernels], rows.upto)
    for number, following in itertools.zip_longest(numbers, numbers[1:]):
        found = _timed(task, _competing(kernels, number), number, runner, following)
        if isinstance(found, str):
            return found
        secs[number] = found
        verified.add(number)
        best.append((number, _fastest(found, number)))
    for (below, _), (_, tuned) in itertools.pairwise(best):
        kernel = next(kernel for kernel in kernels if kernel.tuned == tuned)
        if below + 1 not in verified and isinstance(wrong := _timed(task, [kernel], below + 1, runner), str):
            return wrong
        verified.add(below + 1)
    ends = [(number, tuned) for place, (number, tuned) in enumerate(best) if place + 1 == len(best) or best[place + 1][1] != tuned]
    return Chosen(tuple(ends), secs, tuple(sorted(verified)))


def _fastest(found: Mapping[int, float], number: int) -> int:
    """Return what the fastest kernel is tuned for; of several within noise, what is the nearest to the number of rows."""
    least = min(found.values())
    return min((tuned for tuned, secs in found.items() if secs <= least * (1 + TIE)), key=lambda tuned: abs(math.log(number / tuned)))


def _competing(kernels: Sequence[RowsKernel], number: int) -> list[RowsKernel]:
    fitting = [kernel for kernel in kernels if kernel.takes(number)]
    below, above = ([kernel for kernel in fitting if (kernel.tuned < number) == is_below] for is_below in (True, False))
    return [*below[-NEIGHBOURS:], *above[:NEIGHBOURS]]


def _timed(task: Task, kernels: Sequence[RowsKernel], number: int, runner: Runner, following: int | None = None) -> dict[int, float] | str:
    """Return the seconds of a call with so many rows of each kernel that is right there; why none is, as a sentence.

    While a GPU measures, the inputs and the reference of the number that follows are made.
    """
    spec = _spec(task, number)
    if "failure" in (answer := runner.measure(task.measure_request("prepare", spec=spec), PREPARE_SECS)):
        way_out = f"; declare an upto below {number}" if is_short_of_memory(answer["failure"]) else ""
        return f"inputs or reference of {number} rows: {answer['failure']}{way_out}"
    if following and task.arch.gpu:
        runner.measure(task.measure_request("prepare_next", spec=_spec(task, following)), PREPARE_SECS)
    first: dict[int, float] = {}
    failures: list[str] = []
    for kernel in kernels:
        answer = _asked(task, kernel, spec, runner, {"action": "verify"})
        if failure := judged(answer, task.tolerance):
            failures.append(f"the kernel tuned for {kernel.tuned} rows fails at {number} rows: {failure}")
            runner.measure(task.measure_request("prepare", spec=spec), PREPARE_SECS)
        else:
            first[kernel.tuned] = answer["secs"]
    if not first:
        return "; ".join(failures)
    near = {tuned: secs for tuned, secs in first.items() if secs <= SLOWDOWN * min(first.values())}
    return near if len(near) == 1 else _raced(task, [kernel for kernel in kernels if kernel.tuned in near], spec, runner, near)


def _raced(
    task: Task, kernels: Sequence[RowsKernel], spec: Mapping[str, Any], runner: Runner, first: Mapping[int, float]
) -> dict[int, float]:
    """Return the median seconds of each kernel, sampled in turns."""
    kind, timing = task.arch.kind, task.workload.timing
    calls = {tuned: calls_in(budget_of(kind, timing).sample_secs, secs) for tuned, secs in first.items()}
    samples: dict[int, list[float]] = {kernel.tuned: [] for kernel in kernels}
    for _ in range(ROUNDS):
        for kernel in kernels:
            each: list[float] = []
            for protocol in raced(kind, timing):
                asked = {"action": "sample", "calls": calls[kernel.tuned], "samples": 1, "protocol": protocol}
                each += _asked(task, kernel, spec, runner, asked).get("samples", [math.inf])
            samples[kernel.tuned].append(math.prod(each) ** (1 / len(each)))
    return {tuned: rounded(median(found)) for tuned, found in samples.items() if not math.isinf(median(found))}


def _asked(task: Task, kernel: RowsKernel, spec: Mapping[str, Any], runner: Runner, asked: Mapping[str, Any]) -> Answer:
    fields = {name: value for name, value in asked.items() if name != "action"}
    where = {"library": str(kernel.library), "symbol": kernel.symbol}
    return runner.measure(task.measure_request(asked["action"], spec=spec, **fields, **where), VERIFY_SECS)


def _spec(task: Task, number: int) -> dict[str, Any]:
    """Return what a worker needs to know to make inputs and reference of a number of rows."""
    rows = task.workload.rows
    assert rows is not None, "these have rows"
    attrs = rows.at(dict(task.workload.attrs), number)
    return {
        **{name: value for name, value in task.spec.items() if name not in {"rows", "computation", "names"}},
        "attrs": attrs,
        "seed": task.seed,
    }
