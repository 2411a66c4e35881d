"""Owns how a kernel is checked and timed on an NVIDIA GPU, inside a worker: memory, poison, guards, graphs, samples.

Knows nothing of which candidates there are, of how many samples are wanted or of what wins. Imports no compiler: TVM's
runtime libraries are loaded by themselves.

Caches are cold: a sample is one CUDA graph of several launches, each on arguments that the L2 cache does not hold, and
what it does hold before the first is memory that none of them reads. The graph itself records when it begins and ends.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from kerneldecl.arrays import Array, is_float, numpy_dtype
from kerneldecl.artifact.kernels import Placed, kernel_of, load_library
from kerneldecl.hardware.cuda_driver import read_gpus
from kerneldecl.model import Arg
from kerneldecl.runners import nvml
from kerneldecl.runners.cuda_checks.checks import Checks
from kerneldecl.runners.cuda_device import CudaError, Device, Graph, device
from kerneldecl.runners.memory_layout import GUARD_BYTES, copies, most_calls, place
from kerneldecl.runners.reference_data import AtHand, Case

__all__ = ["ceilings", "foresee", "prepare", "sample", "verify"]

GUARD_BYTE = 0x5A
POISON_BYTES = {True: 0xFF, False: 0xA5}
"""By whether the dtype is a floating-point one: all bits set is a NaN of each of them."""
WARM_SECS = 0.1
"""An idle GPU takes about so long to raise its clocks."""
IDLE_SECS = 0.05
REST_SECS = 0.03
"""At most, after a sample: otherwise as long as it took."""
_COPY_BYTES = 1 << 29
_SHORT_SECS = 1e-3

Kernel = Callable[..., object]


class _Brought:
    """The workload at hand: its case, where it lies on the GPU, and the kernels and graphs that were made for it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.gpu, self.checks = device(), _checks()
        self.sizes = [_bytes(arg) for arg in case.signature.args]
        self.placement = place(self.sizes, GUARD_BYTES)
        self.kernels: dict[str, Kernel] = {}
        self.graphs: dict[tuple[str, int], Graph] = {}
        self._memory: list[int] = []
        self._rested = 0.0
        try:
            self._bring()
        except CudaError:  # too little memory
            self.close()
            raise

    def _bring(self) -> None:
        self.base = self._allocated(self.placement.total_bytes)
        self.expected = [self._allocated(want.nbytes + 8) for want in self.case.expected]
        self._flushed = self._allocated(2 * self.gpu.l2_bytes)
        self.gpu.fill(self._flushed, 0, 2 * self.gpu.l2_bytes)
        self.restore()
        kept = [*zip(self.inputs, self.sizes, strict=False), *((at, want.nbytes) for at, want in self._expected())]
        self._kept = [(address, size, self.checks.checksum(address, size)) for address, size in kept]
        self._rms = [self.checks.rms(at, want.dtype.name, want.size) for at, want in self._expected()]
        self._sets = [self._placed([self.base + offset for offset in self.placement.offsets])]

    def _expected(self) -> Iterator[tuple[int, Array]]:
        return zip(self.expected, self.case.expected, strict=True)

    @property
    def inputs(self) -> list[int]:
        return [self.base + offset for offset in self.placement.offsets[: len(self.case.inputs)]]

    @property
    def outputs(self) -> list[int]:
        return [self.base + offset for offset in self.placement.offsets[len(self.case.inputs) :]]

    def _allocated(self, size_bytes: int) -> int:
        self._memory.append(self.gpu.allocate(size_bytes))
        return self._memory[-1]

    def _placed(self, addresses: Sequence[int]) -> list[Placed]:
        args = zip(self.case.signature.args, addresses, strict=True)
        return [Placed(arg, address, Placed.CUDA, self.gpu.ordinal) for arg, address in args]

    def restore(self) -> None:
        """Bring guards, inputs and expected outputs to the GPU, again where a kernel has overwritten them."""
        for offset, size in self.placement.guards:
            self.gpu.fill(self.base + offset, GUARD_BYTE, size)
        self.gpu.wait()
        for address, array in (*zip(self.inputs, self.case.inputs, strict=True), *self._expected()):
            self.gpu.upload(np.ascontiguousarray(array), address)

    def poison(self) -> None:
        for address, arg in zip(self.outputs, self.case.signature.outputs, strict=True):
            self.gpu.fill(address, POISON_BYTES[is_float(arg.dtype)], _bytes(arg))

    def damage(self) -> str:
        """Return what the kernel has written that is not an output of it; empty if nothing."""
        for offset, size in self.placement.guards:
            if changed := self.checks.other_bytes(self.base + offset, size, GUARD_BYTE):
                return f"it wrote at least {changed} bytes outside of its arguments"
        for at, (address, size, checksum) in enumerate(self._kept):
            if self.checks.checksum(address, size) != checksum:
                return "it wrote into its inputs" if at < len(self.case.inputs) else "it wrote far outside of its arguments"
        return ""

    def error(self) -> float:
        """Return the largest relative error of all outputs."""
        outputs = zip(self.outputs, self.case.signature.outputs, self.expected, self.case.expected, self._rms, strict=True)
        return max(
            self.checks.relative_error((got, arg.dtype), (want, array.dtype.name), array.size, rms)
            for got, arg, want, array, rms in outputs
        )

    def sets(self) -> list[list[Placed]]:
        """Return the sets of arguments that launches take in turn; all but the first are made when they are first needed."""
        if len(self._sets) == 1:
            whole = place(self.sizes, 0)
            more = copies(sum(self.sizes), self.gpu.l2_bytes, self.gpu.free_bytes()) - 1
            base = self._allocated(more * whole.total_bytes)
            for start in range(base, base + more * whole.total_bytes, whole.total_bytes):
                addresses = [start + offset for offset in whole.offsets]
                for source, target, size in zip(self.inputs, addresses, self.sizes, strict=False):
                    self.gpu.copy(source, target, size)
                self._sets.append(self._placed(addresses))
        return self._sets

    def graph(self, library: str, kernel: Kernel, calls: int) -> Graph:
        """Return the graph of so many launches, each on the next set of arguments."""
        if (library, calls) not in self.graphs:
            sets = self.sets() if calls > 1 else self._sets[:1]
            chosen = [[placed.tensor() for placed in sets[call % len(sets)]] for call in range(calls)]

            def launch() -> None:
                for tensors in chosen:
                    kernel(*tensors)

            with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", self.gpu.ordinal), self.gpu.stream.value or 0):
                self.graphs[library, calls] = self.gpu.timed_graph(launch)
        return self.graphs[library, calls]

    def flush(self) -> None:
        """Fill the L2 cache with memory that no kernel reads; read, not written, so that nothing is left to be written back."""
        self.checks.read(self._flushed, 2 * self.gpu.l2_bytes)

    def warm(self) -> None:
        """Keep the GPU busy until its clocks are up."""
        end = time.monotonic() + WARM_SECS
        while time.monotonic() < end:
            self.flush()
            self.gpu.wait()

    def timed(self, graph: Graph) -> float:
        """Return the seconds that a graph takes on a GPU that has rested as long as the one before took.

        A clock that is held down by power has other kernels' power in it. After a rest it is the kernel's own, as in steady work.
        """
        time.sleep(max(0.0, self._rested - time.monotonic()))
        self.flush()
        secs = graph.run()
        self._rested = time.monotonic() + min(secs, REST_SECS)
        return secs

    def close(self) -> None:
        for graph in self.graphs.values():
            graph.close()
        for address in self._memory:
            self.gpu.release(address)


def _bytes(arg: Arg) -> int:
    return int(np.prod(arg.shape, dtype=np.int64)) * numpy_dtype(arg.dtype).itemsize


@functools.cache
def _checks() -> Checks:
    return Checks(device())


_BUSY: dict[str, float] = {"until": 0.0}
_CONDITIONS: dict[str, dict[str, Any]] = {}
"""Of the GPU, before and after the race at hand."""


def _bring(case: Case) -> _Brought:
    _CONDITIONS.clear()
    return _Brought(case)


_AT_HAND = AtHand(_bring, _Brought.close)


def prepare(case: Mapping[str, Any]) -> dict[str, Any]:
    """Make the random inputs and the reference's outputs of a workload, and bring them to the GPU: root, rule, attrs and seed."""
    _AT_HAND.of(case)
    return {}


def foresee(case: Mapping[str, Any]) -> dict[str, Any]:
    """Begin to make the inputs and the reference of the workload that is prepared next: the host does it while the GPU measures."""
    _AT_HAND.foresee(case)
    return {}


def verify(case: Mapping[str, Any], library: str, symbol: str) -> dict[str, Any]:
    """Run a kernel on poisoned outputs between guards; return its relative error and the seconds it took, or what it damaged."""
    at_hand = _AT_HAND.of(case)
    kernel = kernel_of(load_library(Path(library), "cuda"), symbol)
    graph = at_hand.graph(library, kernel, 1)
    at_hand.poison()
    at_hand.flush()
    secs = graph.run()
    if damage := at_hand.damage():
        at_hand.restore()
        return {"failure": damage}
    error = at_hand.error()
    if secs < _SHORT_SECS:  # what is loaded at a first launch shows in a short one
        at_hand.flush()
        secs = min(secs, graph.run())
    at_hand.kernels[library] = kernel
    return {"error": error, "secs": secs}


def sample(case: Mapping[str, Any], library: str, symbol: str, calls: int, samples: int) -> dict[str, Any]:
    """Return seconds a call, one figure a sample, each the mean of up to `calls` launches in one graph."""
    at_hand = _AT_HAND.of(case)
    kernel = at_hand.kernels.get(library) or kernel_of(load_library(Path(library), "cuda"), symbol)
    at_hand.kernels[library] = kernel
    sets = at_hand.sets()
    count = min(calls, most_calls(len(sets), sum(at_hand.sizes), at_hand.gpu.l2_bytes))
    graph = at_hand.graph(library, kernel, count)
    if time.monotonic() - _BUSY["until"] > IDLE_SECS:
        at_hand.warm()
    if "before" not in _CONDITIONS:
        _CONDITIONS["before"] = nvml.conditions(_uuid())
    found = [at_hand.timed(graph) / count for _ in range(samples)]
    _BUSY["until"] = time.monotonic()
    return {"samples": found}


@functools.cache
def _uuid() -> str:
    return read_gpus()[0].uuid


def ceilings() -> dict[str, Any]:
    """Return what the GPU reaches, what it is and how it was before and after the race at hand.

    `dram_bytes_per_s` is of a copy on the device, reads and writes counted; `clock_hz` that of its multiprocessors.
    """
    after = nvml.conditions(_uuid())
    clock = {"clock_hz": after["sm_clock_hz"]} if "sm_clock_hz" in after else {}
    device_is = {"gpu": read_gpus()[0].model, "driver": nvml.driver_version()}
    return {"dram_bytes_per_s": _dram_bytes_per_s(device()), **clock, "device": device_is, "conditions": {**_CONDITIONS, "after": after}}


@functools.cache
def _dram_bytes_per_s(gpu: Device) -> float:
    """Time copies between two stretches of memory, each far larger than the L2 cache, until the clocks are up."""
    source, target = gpu.allocate(_COPY_BYTES), gpu.allocate(_COPY_BYTES)
    gpu.fill(source, 1, _COPY_BYTES)
    graph = gpu.timed_graph(lambda: _checks().copy(source, target, _COPY_BYTES))
    end, secs = time.monotonic() + WARM_SECS, math.inf
    while time.monotonic() < end:
        secs = min(secs, graph.run())
    graph.close()
    gpu.release(source)
    gpu.release(target)
    return 2 * _COPY_BYTES / secs
