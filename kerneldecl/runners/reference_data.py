"""Owns the reference data that kernels are checked and timed with: a workload's random inputs, and its reference's outputs.

Knows nothing of kernels or devices.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from kerneldecl.arrays import PERIOD, Array, is_float, random_array, row_scales
from kerneldecl.plugins.find import is_own
from kerneldecl.plugins.load import load_rule
from kerneldecl.rule import Rule
from kerneldecl.runners import input_range
from kerneldecl.runners.special_values import NAN, REPEATED_HUGE, has_infinity, in_range, large, small, sprinkled
from kerneldecl.signature import Signature

WorkloadSpec = Mapping[str, Any]
"""A workload as a request describes it: root, rule, attrs and seed."""
Resident = TypeVar("Resident")


@dataclass(frozen=True)
class DataSet:
    """One set of inputs, and what the reference makes of them, in the signature's order."""

    inputs: tuple[Array, ...]
    """Arrays as the rule makes them: of inputs, and behind them of what is updated in place."""
    expected: tuple[Array, ...]
    """Arrays of the outputs' shapes, in a higher precision than the outputs'."""
    where: str = ""
    """What is special about the inputs, as the end of a sentence about the results."""
    any_for_nan: bool = False
    """True where a result may be anything if NaN is expected: sums of infinities are NaN or not by the order of their terms."""
    kept: tuple[Array, ...] = ()
    """For each argument that is updated in place, which of its elements must stay as they are."""


@dataclass(frozen=True)
class ReferenceData:
    """What a workload's kernels are verified with, and timed on."""

    signature: Signature
    inputs: tuple[Array, ...]
    expected: tuple[Array, ...]
    others: tuple[DataSet, ...] = ()
    """Further sets of inputs, from other seeds, special values among them."""
    is_repeatable: bool = True
    """Whether two calls on the same inputs must give the same bits."""
    rows_vary: bool = False
    """Whether errors are relative to the size of their row, where that is larger than that of all results."""
    kept: tuple[Array, ...] = ()
    """Which elements of each updated argument must stay as they are."""
    least_bytes: float = math.inf
    """Bytes that a call moves at least: fewer than its arguments have where it looks up a part of them."""

    def all_scales(self, rms: Sequence[float]) -> list[list[Array]]:
        """Return what errors of each set's expected outputs are relative to, given the root mean squares of the first set's.

        Those count for all sets, or for each row where its own is not larger: a huge number makes results of its row large.
        """
        return [
            [row_scales(want, one) if self.rows_vary else np.array([one]) for want, one in zip(each.expected, rms, strict=True)]
            for each in self.sets
        ]

    @property
    def sets(self) -> tuple[DataSet, ...]:
        return DataSet(self.inputs, self.expected, kept=self.kept), *self.others


def make_reference_data(spec: WorkloadSpec) -> ReferenceData:
    """Make a workload's inputs from its seed, and run its rule's reference on them; raise ValueError where they would verify nothing."""
    root = Path(spec["root"])
    rule = load_rule(root, spec["rule"]).of(root, spec["attrs"])
    signature, seed = rule.signature(), spec["seed"]
    inputs, expected, halvings = _data(rule, _inputs(rule, seed))
    # A standard rule may compute nothing, such as the mean of an image of one pixel.
    if defect := vacuous(signature, inputs, expected, rule.flops() if is_own("rules", root, spec["rule"]) else 0):
        raise ValueError(f"rule {spec['rule']}: {defect}")
    others = tuple(_other_sets(rule, seed, halvings, ignores_nan=spec.get("nan") == "ignore"))
    kept = _kept(rule, inputs, expected)
    return ReferenceData(signature, inputs, expected, others, rule.is_repeatable(), rule.rows_vary(), kept, rule.least_bytes())


def _inputs(rule: Rule, seed: int) -> tuple[Array, ...]:
    """Return inputs and what updated arguments hold, which is random where the rule does not say it."""
    rng, signature = np.random.default_rng(seed), rule.signature()
    made = tuple(map(np.asarray, rule.inputs(rng)))
    if len(made) not in {len(signature.inputs), len(signature.given)}:
        raise ValueError(f"inputs() returns {len(made)} arrays, expected {len(signature.inputs)}, those of signature().inputs")
    for array, arg in zip(made, signature.given, strict=False):
        if array.shape != tuple(arg.shape):
            raise ValueError(f"inputs() returns {list(array.shape)} for {arg.name}, expected {list(arg.shape)}, as signature() has it")
    return (*made, *(random_array(rng, arg) for arg in signature.given[len(made) :]))


def _data(rule: Rule, inputs: Sequence[Array]) -> tuple[tuple[Array, ...], tuple[Array, ...], int]:
    """Return inputs, what the reference makes of them, and how often inputs were halved to keep that within the outputs' dtypes."""
    signature = rule.signature()
    return input_range.within_range(inputs, signature.given, lambda made: _expected(rule, signature, made), signature.outputs)


def _expected(rule: Rule, signature: Signature, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """Return the reference's outputs; raise ValueError where it writes into its inputs."""
    held = [array.view() for array in inputs]
    for array in held:
        array.flags.writeable = False
    try:
        with np.errstate(all="ignore"):
            found = rule.reference(*held)
    except ValueError as error:
        if "read-only" in str(error):
            raise ValueError("reference() writes into its inputs; it must return new arrays") from error
        raise
    several = [found] if isinstance(found, np.ndarray) else list(found)
    if len(several) != len(signature.outputs):
        raise ValueError(f"reference() returns {len(several)} arrays, expected {len(signature.outputs)}, those of signature().outputs")
    for want, arg in zip(several, signature.outputs, strict=True):
        if np.asarray(want).size != math.prod(arg.shape):
            raise ValueError(
                f"reference() returns {list(np.shape(want))} for {arg.name}, expected {list(arg.shape)}, as signature() has it"
            )
    return tuple(np.asarray(want).reshape(arg.shape) for want, arg in zip(several, signature.outputs, strict=True))


def _kept(rule: Rule, inputs: Sequence[Array], expected: Sequence[Array]) -> tuple[Array, ...]:
    """Return which elements of each updated argument stay as they are: the reference leaves those, and NaN in their place."""
    signature = rule.signature()
    given, held = inputs[: len(signature.inputs)], inputs[len(signature.inputs) :]
    if not held:
        return ()
    marked = _expected(rule, signature, [*given, *(_marked(array) for array in held)])
    same = [(want == array) | (np.isnan(want) & np.isnan(array.astype(want.dtype))) for want, array in zip(expected, held, strict=False)]
    return tuple(np.isnan(mark) & each for mark, each in zip(marked, same, strict=False))


def _marked(array: Array) -> Array:
    return np.full(array.shape, np.nan)


def vacuous(signature: Signature, inputs: Sequence[Array], expected: Sequence[Array], flops: float) -> str:
    """Return why a kernel that computes something else would pass on such data, as a sentence; empty where it would not."""
    for arg, array in zip(signature.given, inputs, strict=True):
        if is_float(arg.dtype) and array.size > 1 and (_all(np.isnan, array) or _all(functools.partial(np.equal, array.flat[0]), array)):
            return f"inputs() gives {arg.name} one value everywhere, {array.flat[0]:g}; give it random ones"
    for arg, array in zip(signature.given, inputs, strict=True):
        for out, want in zip(signature.outputs, expected, strict=True):
            if flops > 0 and want.size > 1 and want.shape == array.shape and _all(np.equal, want, array):
                return f"reference() returns its input {arg.name} as output {out.name}, but flops() says that something is computed"
    for out, want in zip(signature.outputs, expected, strict=True):
        if is_float(out.dtype) and want.size and _all(np.isnan, want):
            return f"reference() gives NaN everywhere in output {out.name}"
    return ""


_FEW = 1024


def _all(predicate: Callable[..., Array], *arrays: Array) -> bool:
    """Say whether a predicate holds of all elements; the first few mostly tell that it does not."""
    few = (array.reshape(-1)[:_FEW] for array in arrays)
    return bool(predicate(*few).all() and predicate(*arrays).all())


MANY_BYTES = 1 << 28
"""Inputs and outputs of a workload above which no set has infinities: references of large operators take seconds."""


def _other_sets(rule: Rule, seed: int, halvings: int, *, ignores_nan: bool) -> Iterator[DataSet]:
    """Yield sets of inputs of other seeds, halved as often as the first; where the rule takes them, special values are among them."""
    signature = rule.signature()
    if not rule.takes_special_values():
        inputs, expected, _ = _data(rule, input_range.halved(_inputs(rule, seed + 1), signature.given, halvings))
        yield DataSet(inputs, expected, " on other inputs", kept=_kept(rule, inputs, expected))
        return
    floats = [at for at, arg in enumerate(signature.given) if is_float(arg.dtype)]
    nan = () if ignores_nan else NAN

    def with_special(seed: int, values: Callable[[int, str], Sequence[float]], where: str, *, any_for_nan: bool) -> DataSet:
        rng, inputs = np.random.default_rng(seed), list(input_range.halved(_inputs(rule, seed), signature.given, halvings))
        for at in floats:
            if chosen := values(at, signature.given[at].dtype):
                inputs[at] = sprinkled(rng, inputs[at], chosen)
        expected = _expected(rule, signature, inputs)
        ranged = (in_range(want, arg.dtype) for want, arg in zip(expected, signature.outputs, strict=True))
        return DataSet(tuple(inputs), tuple(ranged), where, any_for_nan or rule.nan_may_vanish(), _kept(rule, inputs, expected))

    says = " where inputs hold zeros, tiny numbers" + ("" if ignores_nan else " and NaN")
    first = with_special(seed + 1, lambda _, dtype: (*nan, *small(dtype)), says, any_for_nan=False)
    yield first
    if len(floats) > 1 and not ignores_nan and _is_mostly_nan(first.expected):
        # NaN in a vector is in every result, and hides what becomes of NaN in the matrix.
        largest = max(floats, key=lambda at: first.inputs[at].size)
        yield with_special(seed + 2, lambda at, dtype: (*(nan if at == largest else ()), *small(dtype)), says, any_for_nan=False)
    is_large = sum(array.nbytes for array in (*first.inputs, *first.expected)) > MANY_BYTES
    if not is_large and all(has_infinity(arg.dtype) for arg in signature.outputs):
        says, most = " where inputs hold infinities and huge numbers", rule.largest_input()
        limits = [min(most, REPEATED_HUGE) if max(arg.shape, default=0) > PERIOD else most for arg in signature.given]

        def infinite(at: int, dtype: str) -> tuple[float, ...]:
            # An infinite scale would multiply the sign of what rounding leaves of zero.
            return large(dtype, limits[at]) if first.inputs[at].size > 1 else ()

        yield with_special(seed + 3, infinite, says, any_for_nan=True)


def _is_mostly_nan(arrays: Sequence[Array]) -> bool:
    return all(np.isnan(array).mean() > 0.5 for array in arrays if array.dtype.kind == "f" and array.size)


class ResidentData(Generic[Resident]):
    """Keeps one workload's reference data on a worker's device; makes it again where a crash took the process that had it."""

    def __init__(self, upload: Callable[[ReferenceData], Resident], release: Callable[[Resident], object] = lambda _: None) -> None:
        self._upload, self._release = upload, release
        self._resident: dict[str, Resident] = {}
        """Data of one workload at most, by the JSON of its spec."""
        self._next: dict[str, Future[ReferenceData]] = {}
        """Data of one workload at most that is still being made, by the JSON of its spec."""
        self._maker = ThreadPoolExecutor(1, "next-reference-data")

    def of(self, spec: WorkloadSpec) -> Resident:
        """Return a workload's data on the device; make and upload it, in the place of another's, unless it is there."""
        text = json.dumps(spec, sort_keys=True)
        if text not in self._resident:
            prepared = self._next.pop(text, None)
            self.clear()
            self._resident[text] = self._upload(prepared.result() if prepared else make_reference_data(spec))
        return self._resident[text]

    def prepare_next(self, spec: WorkloadSpec) -> None:
        """Start to make, in another thread, the data of the workload that is measured next."""
        text = json.dumps(spec, sort_keys=True)
        if text not in self._resident and text not in self._next:
            self._next = {text: self._maker.submit(make_reference_data, spec)}

    def clear(self) -> None:
        """Release what is on the device."""
        while self._resident:
            self._release(self._resident.popitem()[1])
