"""Owns which recorded configurations are nearest to a computation: of like computations, those whose extents differ least.

Knows nothing of policies or of search spaces. Two computations are alike if their blocks differ in extents alone.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kerneldecl.errors import ArtifactError
from kerneldecl.model import SPECIALIZE, Access, Arch, Block, Candidate, IterSpace
from kerneldecl.policies.shared.tuning import Recorded
from kerneldecl.store.keys import lines_of
from kerneldecl.store.local import Record
from kerneldecl.store.results import Lowered, TuneResult

MOST = 64
"""Configurations that a policy is given."""
OTHER_DEVICE = 3.0
"""How far away another device is: as far as an extent 8 times as large."""
_NOT_CONFIGURED = frozenset({SPECIALIZE, "trace", "tvm_default"})
"""Templates whose candidates are of one function, or have no parameters."""


@dataclass(frozen=True)
class _Measured:
    """A tuning of which a record tells."""

    result: TuneResult
    model: str
    kind: str
    """Of arch."""
    lowered: Lowered

    @functools.cached_property
    def fastest(self) -> tuple[Candidate, ...]:
        """The configurations that were timed, fastest first, behind the winner."""
        timed = sorted((trial for trial in self.result.trials if trial.samples), key=lambda trial: trial.run_secs)
        found = dict.fromkeys((self.result.winner, *(trial.candidate for trial in timed)))
        return tuple(each for each in found if each.template not in _NOT_CONFIGURED)

    @property
    def source(self) -> dict[str, str]:
        return {"record": self.result.key, "arguments": arguments(self.lowered), "model": self.model}


class Nearest:
    """What tune records tell of configurations of like computations."""

    def __init__(self, tuned: Iterable[Record], lowered: Iterable[Record]) -> None:
        spaces = {each.computation: each for each in (Lowered(record.result) for record in lowered)}
        self._by_form: dict[Hashable, list[_Measured]] = {}
        for record in tuned:
            result = TuneResult(record.key, record.result)
            if result.is_measured and result.computation in spaces:
                lines = lines_of(record.manifest)
                model, kind = (str(json.loads(lines.get(name, '""'))) for name in ("arch.model", "arch.kind"))
                found = _Measured(result, model, kind, spaces[result.computation])
                self._by_form.setdefault(form(found.lowered.space), []).append(found)

    def of(self, lowered: Lowered, arch: Arch) -> tuple[Recorded, ...]:
        """Return the configurations of the nearest tunings: their winners, nearest first, then their second best, and so on.

        A tuning of this very computation on this device is none of them: what it has measured is known.
        """
        own = extents(lowered.space)

        def away(each: _Measured) -> tuple[float, str]:
            there = extents(each.lowered.space)
            sizes = sum(abs(math.log2(theirs / ours)) for ours, theirs in zip(own, there, strict=True))
            return sizes + OTHER_DEVICE * (each.model != arch.model), each.result.key

        others = [each for each in self._by_form.get(form(lowered.space), ()) if each.kind == arch.kind]
        near = sorted((each for each in others if (each.result.computation, each.model) != (lowered.computation, arch.model)), key=away)
        return tuple(itertools.islice(_in_turn(near), MOST))


def _in_turn(near: Sequence[_Measured]) -> Iterator[Recorded]:
    """Yield the best of each, then the second of each, and so on; a record that is damaged gives nothing."""
    lists: list[list[Recorded]] = []
    for each in near[:MOST]:
        try:
            lists.append([Recorded(candidate, each.source) for candidate in each.fastest])
        except ArtifactError:
            continue
    for several in itertools.zip_longest(*lists):
        yield from (each for each in several if each is not None)


def extents(space: IterSpace) -> tuple[int, ...]:
    """Return the extents of all axes."""
    return tuple(axis.extent for block in space.blocks for axis in block.axes)


def form(space: IterSpace) -> Hashable:
    """Return what computations of one form share: everything but extents, constants and names."""
    return tuple(_form(block) for block in space.blocks), len(space.inputs), len(space.outputs)


def _form(block: Block) -> Hashable:
    axes = tuple(axis.kind for axis in block.axes)
    accesses = tuple(_access_form(access) for access in (*block.reads, *block.writes))
    return axes, accesses, block.flops_per_point, block.is_multiply_accumulate, len(block.conditions)


def _access_form(access: Access) -> Hashable:
    return access.dtype, tuple(None if terms is None else tuple(axis for axis, _ in terms) for terms in access.index)


def arguments(lowered: Lowered) -> str:
    """Return the shapes of a computation's arguments, the results behind an arrow: `float16 64x32, 64x32 -> 64x64`."""
    sides = [", ".join("x".join(map(str, argument["shape"])) for argument in lowered.signature[side]) for side in ("inputs", "outputs")]
    dtypes: list[Any] = list(dict.fromkeys(argument["dtype"] for argument in lowered.signature["inputs"]))
    return f"{' '.join(dtypes)} {sides[0]} -> {sides[1]}"
