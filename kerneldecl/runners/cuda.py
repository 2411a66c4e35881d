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
from collections.abc import Callable, Iterator, Sequence
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
from kerneldecl.runners.reference_data import ReferenceData, ResidentData, WorkloadSpec

__all__ = ["measured_peaks", "prepare", "prepare_next", "sample", "verify"]

GUARD_BYTE = 0x5A
POISON_BYTES = {True: 0xFF, False: 0xA5}
"""Byte that outputs are filled with, by whether their dtype is a floating-point one: all bits set is NaN in each of those."""
WARM_SECS = 0.1
"""Time that an idle GPU takes to raise its clocks, about."""
IDLE_SECS = 0.05
"""Time without a launch after which the GPU is warmed up again."""
REST_SECS = 0.03
"""Longest rest after a sample; after shorter samples the GPU rests as long as the sample took."""
_COPY_BYTES = 1 << 29
_SHORT_SECS = 1e-3
"""Launches that take less are run twice: loading code shows in the first one."""

Kernel = Callable[..., object]


class _OnGpu:
    """One workload's reference data in the GPU's memory, and the kernels and graphs that were made for it."""

    def __init__(self, data: ReferenceData) -> None:
        self.data = data
        self.gpu, self.checks = device(), _checks()
        self.sizes = [_bytes(arg) for arg in data.signature.args]
        self.placement = place(self.sizes, GUARD_BYTES)
        self.kernels: dict[str, Kernel] = {}
        self.graphs: dict[tuple[str, int], Graph] = {}
        self._memory: list[int] = []
        self._rest_until = 0.0
        try:
            self._upload()
        except CudaError:  # too little memory
            self.close()
            raise

    def _upload(self) -> None:
        self.base = self._allocated(self.placement.total_bytes)
        self.expected = [self._allocated(want.nbytes + 8) for want in self.data.expected]
        self._flushed = self._allocated(2 * self.gpu.l2_bytes)
        self.gpu.fill(self._flushed, 0, 2 * self.gpu.l2_bytes)
        self.restore()
        protected = [*zip(self.inputs, self.sizes, strict=False), *((at, want.nbytes) for at, want in self._expected())]
        self._protected = [(address, size, self.checks.checksum(address, size)) for address, size in protected]
        self._rms = [self.checks.rms(at, want.dtype.name, want.size) for at, want in self._expected()]
        self._sets = [self._arguments_at([self.base + offset for offset in self.placement.offsets])]

    def _expected(self) -> Iterator[tuple[int, Array]]:
        return zip(self.expected, self.data.expected, strict=True)

    @property
    def inputs(self) -> list[int]:
        return [self.base + offset for offset in self.placement.offsets[: len(self.data.inputs)]]

    @property
    def outputs(self) -> list[int]:
        return [self.base + offset for offset in self.placement.offsets[len(self.data.inputs) :]]

    def _allocated(self, size_bytes: int) -> int:
        self._memory.append(self.gpu.allocate(size_bytes))
        return self._memory[-1]

    def _arguments_at(self, addresses: Sequence[int]) -> list[Placed]:
        args = zip(self.data.signature.args, addresses, strict=True)
        return [Placed(arg, address, Placed.CUDA, self.gpu.ordinal) for arg, address in args]

    def restore(self) -> None:
        """Upload guards, inputs and expected outputs; again where a kernel has overwritten them."""
        for offset, size in self.placement.guards:
            self.gpu.fill(self.base + offset, GUARD_BYTE, size)
        self.gpu.wait()
        for address, array in (*zip(self.inputs, self.data.inputs, strict=True), *self._expected()):
            self.gpu.upload(np.ascontiguousarray(array), address)

    def poison(self) -> None:
        for address, arg in zip(self.outputs, self.data.signature.outputs, strict=True):
            self.gpu.fill(address, POISON_BYTES[is_float(arg.dtype)], _bytes(arg))

    def damage(self) -> str:
        """Return what the kernel has written besides its outputs, as a phrase; empty if nothing."""
        for offset, size in self.placement.guards:
            if changed := self.checks.other_bytes(self.base + offset, size, GUARD_BYTE):
                return f"it wrote at least {changed} bytes outside of its arguments"
        for at, (address, size, checksum) in enumerate(self._protected):
            if self.checks.checksum(address, size) != checksum:
                return "it wrote into its inputs" if at < len(self.data.inputs) else "it wrote far outside of its arguments"
        return ""

    def error(self) -> float:
        """Return the largest relative error of all outputs."""
        outputs = zip(self.outputs, self.data.signature.outputs, self.expected, self.data.expected, self._rms, strict=True)
        return max(
            self.checks.relative_error((got, arg.dtype), (want, array.dtype.name), array.size, rms)
            for got, arg, want, array, rms in outputs
        )

    def sets(self) -> list[list[Placed]]:
        """Return the argument sets over which launches rotate; all but the first are made when they are first needed."""
        if len(self._sets) == 1:
            whole = place(self.sizes, 0)
            more = copies(sum(self.sizes), self.gpu.l2_bytes, self.gpu.free_bytes()) - 1
            base = self._allocated(more * whole.total_bytes)
            for start in range(base, base + more * whole.total_bytes, whole.total_bytes):
                addresses = [start + offset for offset in whole.offsets]
                for source, target, size in zip(self.inputs, addresses, self.sizes, strict=False):
                    self.gpu.copy(source, target, size)
                self._sets.append(self._arguments_at(addresses))
        return self._sets

    def graph(self, library: str, kernel: Kernel, calls: int) -> Graph:
        """Return the graph of `calls` launches, each on the next argument set."""
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

    def secs(self, graph: Graph) -> float:
        """Return the seconds that a graph takes on a GPU that has rested as long as the graph before took.

        Without the rest, a clock that power limits depends on the kernels that ran before. After it, the kernel sees the clock that
        its own power allows.
        """
        time.sleep(max(0.0, self._rest_until - time.monotonic()))
        self.flush()
        secs = graph.run()
        self._rest_until = time.monotonic() + min(secs, REST_SECS)
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
"""The GPU's clocks, temperature and power before and after the current workload's race."""


def _upload(data: ReferenceData) -> _OnGpu:
    _CONDITIONS.clear()
    return _OnGpu(data)


_RESIDENT = ResidentData(_upload, _OnGpu.close)


def prepare(spec: WorkloadSpec) -> dict[str, Any]:
    """Make the random inputs and the reference's outputs of a workload, and upload them to the GPU."""
    _RESIDENT.of(spec)
    return {}


def prepare_next(spec: WorkloadSpec) -> dict[str, Any]:
    """Start to make the inputs and the reference's outputs of the next workload: the host works while the GPU measures."""
    _RESIDENT.prepare_next(spec)
    return {}


def verify(spec: WorkloadSpec, library: str, symbol: str) -> dict[str, Any]:
    """Run a kernel on poisoned outputs between guards; return its relative error and the seconds it took, or what it damaged."""
    on_gpu = _RESIDENT.of(spec)
    kernel = kernel_of(load_library(Path(library), "cuda"), symbol)
    graph = on_gpu.graph(library, kernel, 1)
    on_gpu.poison()
    on_gpu.flush()
    secs = graph.run()
    if damage := on_gpu.damage():
        on_gpu.restore()
        return {"failure": damage}
    error = on_gpu.error()
    if secs < _SHORT_SECS:  # the first launch loads code, which shows in a short one
        on_gpu.flush()
        secs = min(secs, graph.run())
    on_gpu.kernels[library] = kernel
    return {"error": error, "secs": secs}


def sample(spec: WorkloadSpec, library: str, symbol: str, calls: int, samples: int) -> dict[str, Any]:
    """Return seconds a call, one figure a sample, each the mean of up to `calls` launches in one graph."""
    on_gpu = _RESIDENT.of(spec)
    kernel = on_gpu.kernels.get(library) or kernel_of(load_library(Path(library), "cuda"), symbol)
    on_gpu.kernels[library] = kernel
    sets = on_gpu.sets()
    count = min(calls, most_calls(len(sets), sum(on_gpu.sizes), on_gpu.gpu.l2_bytes))
    graph = on_gpu.graph(library, kernel, count)
    if time.monotonic() - _BUSY["until"] > IDLE_SECS:
        on_gpu.warm()
    if "before" not in _CONDITIONS:
        _CONDITIONS["before"] = nvml.conditions(_uuid())
    found = [on_gpu.secs(graph) / count for _ in range(samples)]
    _BUSY["until"] = time.monotonic()
    return {"samples": found}


@functools.cache
def _uuid() -> str:
    return read_gpus()[0].uuid


def measured_peaks() -> dict[str, Any]:
    """Return the GPU's measured peaks, its name and driver, and its clocks and power before and after the current workload's race.

    `dram_bytes_per_s` is the bandwidth of a copy on the device, reads and writes counted; `clock_hz` is the SMs' clock.
    """
    after = nvml.conditions(_uuid())
    clock = {"clock_hz": after["sm_clock_hz"]} if "sm_clock_hz" in after else {}
    provenance = {"gpu": read_gpus()[0].model, "driver": nvml.driver_version()}
    return {"dram_bytes_per_s": _dram_bytes_per_s(device()), **clock, "device": provenance, "conditions": {**_CONDITIONS, "after": after}}


@functools.cache
def _dram_bytes_per_s(gpu: Device) -> float:
    """Time copies between two buffers, each far larger than the L2 cache, until the clocks are up."""
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
