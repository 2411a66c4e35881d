"""Owns what a kernel must get right before it is timed: the calls, what its arguments hold before each, what is compared after it.

Knows nothing of devices, which place arguments and compare them, or of tolerances, by which `verdict` judges.

A kernel is called on the same memory with one set of inputs, another, and the first one again, then elsewhere in memory with the
remaining sets. Outputs hold another value before each call: a kernel that reads them, or leaves a part as it was, is wrong in one of
the calls. So is one that keeps what it met in its first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kerneldecl.arrays import Array, is_float
from kerneldecl.runners.reference_data import DataSet, ReferenceData
from kerneldecl.signature import Arg, Signature

NAN_BYTE, NEGATIVE_BYTE, LARGE_BYTE = 0xFF, 0xDA, 0x5A
"""Bytes that outputs are filled with. As floating-point numbers: NaN in each dtype, a large negative number, a large positive one."""


class Call(NamedTuple):
    """One call of a kernel that is verified."""

    data: int
    """Position of its inputs among the reference's sets."""
    poison: int
    """Byte that outputs are filled with before."""
    at_end: bool
    """Whether arguments end where memory ends that may be touched, rather than start where it starts."""


def calls_of(data: ReferenceData) -> list[Call]:
    """Return the calls that verify a kernel; the third repeats the first."""
    last = range(2, len(data.sets)) if len(data.sets) > 2 else range(1, len(data.sets))
    first = [Call(0, NAN_BYTE, at_end=True), Call(1 % len(data.sets), LARGE_BYTE, at_end=True), Call(0, NEGATIVE_BYTE, at_end=True)]
    return [*first, *(Call(at, (LARGE_BYTE, NAN_BYTE)[at % 2], at_end=False) for at in last)]


def poison_byte(call: Call, arg: Arg) -> int:
    """Return the byte that an output is filled with: bits of NaN would be -1 in an integer, which a kernel may well compute."""
    return 0xA5 if call.poison == NAN_BYTE and not is_float(arg.dtype) else call.poison


def changed(signature: Signature, each: DataSet, outputs: Sequence[Array]) -> str:
    """Return what a call changed of its updated arguments that must stay as it is, as a phrase; `outputs` are what it left of them."""
    before = each.inputs[len(signature.inputs) :]
    for arg, was, got, kept in zip(signature.outputs, before, outputs, each.kept, strict=False):
        wide = was.astype(np.float64), got.astype(np.float64)
        differs = kept & (wide[0] != wide[1]) & ~(np.isnan(wide[0]) & np.isnan(wide[1]))
        if count := int(differs.sum()):
            return f"it changes {count} elements of {arg.name} that must stay as they are"
    return ""


class Bench(Protocol):
    """A workload's arguments on a device."""

    data: ReferenceData

    def run(self, kernel: Any, call: Call) -> str:
        """Place arguments and call the kernel; return what it did besides, as a phrase, or nothing."""
        ...

    def error(self, call: Call) -> float:
        """Return the largest relative error of the outputs."""
        ...

    def fingerprint(self, call: Call) -> object:
        """Return what differs where any bit of the outputs does."""
        ...


def verified(bench: Bench, kernel: Any) -> dict[str, Any]:
    """Return the largest error of a kernel with where it occurred and whether its results repeat, or how it failed."""
    worst, where, prints = 0.0, "", dict[int, object]()
    for call in calls_of(bench.data):
        if damage := bench.run(kernel, call):
            return {"failure": damage}
        error = bench.error(call)
        if error > worst:
            worst, where = error, _where(call, bench.data, is_repeated=call.data in prints)
        found = bench.fingerprint(call)
        if found != prints.setdefault(call.data, found) and bench.data.is_repeatable:
            return {"error": worst, "where": where, "differs": True}
    return {"error": worst, "where": where}


def _where(call: Call, data: ReferenceData, *, is_repeated: bool) -> str:
    return " in a later call on the same inputs" if is_repeated else data.sets[call.data].where
