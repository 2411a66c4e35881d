"""Owns the reference data that kernels are checked and timed with: a workload's random inputs, and its reference's outputs.

Knows nothing of kernels or devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from kerneldecl.arrays import Array
from kerneldecl.model import Signature
from kerneldecl.plugins.load import load_rule

WorkloadSpec = Mapping[str, Any]
"""A workload as a request describes it: root, rule, attrs and seed."""
Resident = TypeVar("Resident")


@dataclass(frozen=True)
class ReferenceData:
    """Inputs and expected outputs, in the signature's order."""

    signature: Signature
    inputs: tuple[Array, ...]
    """Arrays as the rule makes them."""
    expected: tuple[Array, ...]
    """Arrays of the outputs' shapes, in a higher precision than the outputs'."""


def make_reference_data(spec: WorkloadSpec) -> ReferenceData:
    """Make a workload's inputs from its seed, and run its rule's reference on them."""
    root = Path(spec["root"])
    rule = load_rule(root, spec["rule"]).of(root, spec["attrs"])
    signature = rule.signature()
    inputs = tuple(rule.inputs(np.random.default_rng(spec["seed"])))
    found = rule.reference(*inputs)
    several = [found] if isinstance(found, np.ndarray) else list(found)
    expected = tuple(np.asarray(want).reshape(arg.shape) for want, arg in zip(several, signature.outputs, strict=True))
    return ReferenceData(signature, inputs, expected)


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
