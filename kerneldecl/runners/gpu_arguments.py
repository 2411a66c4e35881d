"""Owns a workload's arguments in a GPU's memory: sets of inputs, guards, poison, what is compared, and graphs of launches on them.

Knows nothing of requests, of what wins or of how often a kernel is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tvm_ffi

from kerneldecl.arrays import numpy_dtype
from kerneldecl.artifact.kernels import Placed, kernel_of, load_library
from kerneldecl.runners.cuda_checks.checks import Checks
from kerneldecl.runners.cuda_device import CudaError, Graph, device
from kerneldecl.runners.memory_layout import GUARD_BYTES, copies, place
from kerneldecl.runners.reference_data import ReferenceData
from kerneldecl.runners.verification import Call, changed, poison_byte
from kerneldecl.signature import Arg

GUARD_BYTE = 0x5A
SHIFT_BYTES = 256
"""Distance between the two places where arguments lie in turn, for kernels that keep an address."""
WARM_SECS = 0.1
"""Time that an idle GPU takes to raise its clocks, about."""
REST_SECS = 0.03
"""Longest rest after a sample; after shorter samples the GPU rests as long as the sample took."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A kernel with the path that it was loaded from and its symbol there, by which its graphs are known."""

    library: str
    symbol: str
    function: Callable[..., object]
    secs: list[float] = dataclasses.field(default_factory=list)
    """Seconds of its single launches."""

    @property
    def name(self) -> tuple[str, str]:
        return self.library, self.symbol


class OnGpu:
    """One workload's reference data in the GPU's memory, and the kernels and graphs that were made for it."""

    def __init__(self, data: ReferenceData) -> None:
        self.gpu, self.checks = device(), checks()
        self.sizes = [_bytes(arg) for arg in data.signature.args]
        self.touched_bytes = max(1, int(min(data.least_bytes, sum(self.sizes))))
        self.placement = place(self.sizes, GUARD_BYTES)
        self.data = data if self._has_room(data) else dataclasses.replace(data, others=())
        self.kernels: dict[tuple[str, str], Loaded] = {}
        self.graphs: dict[tuple[object, ...], Graph] = {}
        self._memory: list[int] = []
        self._rest_until = 0.0
        try:
            self._upload()
        except CudaError:  # too little memory
            self.close()
            raise

    def _has_room(self, data: ReferenceData) -> bool:
        """Say whether all sets of inputs fit; the race takes half of what is free."""
        held = sum(array.nbytes for each in data.sets for array in (*each.inputs, *each.expected))
        return 2 * (held + self.placement.total_bytes) < self.gpu.free_bytes()

    def _upload(self) -> None:
        self._base = self._allocated(self.placement.total_bytes + SHIFT_BYTES)
        self._held = [[self._kept(array.nbytes) for array in (*each.inputs, *each.expected)] for each in self.data.sets]
        self._flushed = self._allocated(2 * self.gpu.l2_bytes)
        self.gpu.fill(self._flushed, 0, 2 * self.gpu.l2_bytes)
        self.restore()
        self._checksums = [[self.checks.checksum(*at) for at in self._places(each)] for each in range(len(self.data.sets))]
        expected = zip(self._held[0][len(self.data.inputs) :], self.data.expected, strict=True)
        self._scales = self.data.all_scales([self.checks.rms(address, want.dtype.name, want.size) for address, want in expected])
        self._shifted = [self._arguments_at([self._base + shift + at for at in self.placement.offsets]) for shift in (0, SHIFT_BYTES)]
        self._sets = self._shifted[:1]

    def _places(self, data: int) -> list[tuple[int, int]]:
        """Return address and size of the copies that are kept of a set's inputs and expected outputs."""
        each = self.data.sets[data]
        return [(at, array.nbytes) for at, array in zip(self._held[data], (*each.inputs, *each.expected), strict=True)]

    def _argument(self, at: int, shift: int) -> int:
        return self._base + shift + self.placement.offsets[at]

    def _outputs(self, shift: int) -> Iterator[tuple[int, Arg]]:
        outputs = self.data.signature.outputs
        return zip((self._argument(at, shift) for at in range(len(self.data.signature.inputs), len(self.sizes))), outputs, strict=True)

    def _allocated(self, size_bytes: int) -> int:
        self._memory.append(self.gpu.allocate(size_bytes))
        return self._memory[-1]

    def _kept(self, size_bytes: int) -> int:
        """Return memory for a copy of an argument; behind it stand a guard's bytes, which a checksum counts to a whole word."""
        address = self._allocated(size_bytes + 8)
        self.gpu.fill(address, GUARD_BYTE, size_bytes + 8)
        return address

    def _arguments_at(self, addresses: Sequence[int]) -> list[Placed]:
        args = zip(self.data.signature.args, addresses, strict=True)
        return [Placed(arg, address, Placed.CUDA, self.gpu.ordinal) for arg, address in args]

    def restore(self) -> None:
        """Upload all inputs and expected outputs; again where a kernel has overwritten them."""
        self.gpu.wait()
        for each, addresses in zip(self.data.sets, self._held, strict=True):
            for address, array in zip(addresses, (*each.inputs, *each.expected), strict=True):
                self.gpu.upload(np.ascontiguousarray(array), address)
        self.lay_out(0, 0)

    def lay_out(self, data: int, shift: int) -> None:
        """Fill the guards, and copy a set's inputs between them."""
        for offset, size in self.placement.guards:
            self.gpu.fill(self._base + shift + offset, GUARD_BYTE, size)
        for at, (source, size) in enumerate(self._places(data)[: len(self.data.inputs)]):
            self.gpu.copy(source, self._argument(at, shift), size)

    def run(self, kernel: Loaded, call: Call) -> str:
        """Lay out a set of inputs, call the kernel with cold caches, and return what it wrote besides its outputs, as a phrase."""
        shift = 0 if call.at_end else SHIFT_BYTES
        self.lay_out(call.data, shift)
        for address, arg in list(self._outputs(shift))[self.data.signature.updated :]:
            self.gpu.fill(address, poison_byte(call, arg), _bytes(arg))
        graph = self.graph(kernel, 1, shift)
        self.flush()
        secs = graph.run()
        if call.at_end:
            kernel.secs.append(secs)
        return self._damage(call.data, shift) or self._changed(call.data, shift)

    def _changed(self, data: int, shift: int) -> str:
        """Return what a call changed of its updated arguments that must stay as it is, as a phrase."""
        signature, each = self.data.signature, self.data.sets[data]
        updated = list(self._outputs(shift))[: signature.updated]
        left = [np.empty_like(array) for array in each.inputs[len(signature.inputs) :]]
        for (address, _), array in zip(updated, left, strict=True):
            self.gpu.download(address, array)
        return changed(signature, each, left)

    def _damage(self, data: int, shift: int) -> str:
        for offset, size in self.placement.guards:
            if changed := self.checks.other_bytes(self._base + shift + offset, size, GUARD_BYTE):
                return f"it wrote at least {changed} bytes outside of its arguments"
        for at, want in enumerate(self._checksums[data][: len(self.data.signature.inputs)]):
            if self.checks.checksum(self._argument(at, shift), self.sizes[at]) != want:
                return f"it writes into its input {self.data.signature.inputs[at].name}"
        return ""

    def far_damage(self) -> str:
        """Return whether what is kept beside the arguments was overwritten, as a phrase."""
        found = [[self.checks.checksum(*at) for at in self._places(each)] for each in range(len(self.data.sets))]
        return "" if found == self._checksums else "it wrote far outside of its arguments"

    def error(self, call: Call) -> float:
        """Return the largest relative error of all outputs of a call."""
        each, shift = self.data.sets[call.data], 0 if call.at_end else SHIFT_BYTES
        expected = zip(self._held[call.data][len(self.data.inputs) :], each.expected, self._scales[call.data], strict=True)
        return max(
            self.checks.relative_error((got, arg.dtype), (at, want.dtype.name), want.size, scales, any_for_nan=each.any_for_nan)
            for (got, arg), (at, want, scales) in zip(self._outputs(shift), expected, strict=True)
        )

    def fingerprint(self, call: Call) -> object:
        shift = 0 if call.at_end else SHIFT_BYTES
        return [self.checks.checksum(address, _bytes(arg)) for address, arg in self._outputs(shift)]

    def sets(self) -> list[list[Placed]]:
        """Return the argument sets over which launches rotate; all but the first are made when they are first needed."""
        if len(self._sets) == 1:
            whole = place(self.sizes, 0)
            more = copies(sum(self.sizes), self.touched_bytes, self.gpu.l2_bytes, self.gpu.free_bytes()) - 1
            base = self._allocated(more * whole.total_bytes)
            for start in range(base, base + more * whole.total_bytes, whole.total_bytes):
                addresses = [start + offset for offset in whole.offsets]
                for (source, size), target in zip(self._places(0)[: len(self.data.inputs)], addresses, strict=False):
                    self.gpu.copy(source, target, size)
                self._sets.append(self._arguments_at(addresses))
        return self._sets

    @property
    def reuses_l2(self) -> bool:
        """Whether a second replay of a graph would find arguments of the first in L2."""
        return len(self.sets()) * self.touched_bytes < 2 * self.gpu.l2_bytes

    def graph(self, kernel: Loaded | None, calls: int, shift: int = 0, before: Callable[[], None] | None = None) -> Graph:
        """Return the graph of `calls` launches, each on the next argument set; of one launch, on the arguments at a shift.

        `before` launches what runs before each; without a kernel, that is all that runs.
        """
        which = kernel and kernel.name, calls, shift, before
        if which not in self.graphs:
            sets = self.sets() if calls > 1 else self._shifted[shift > 0 :]
            chosen = [[placed.tensor() for placed in sets[call % len(sets)]] for call in range(calls)]

            def launch() -> None:
                for tensors in chosen:
                    if before:
                        before()
                    if kernel:
                        kernel.function(*tensors)

            with self._on_stream():
                self.graphs[which] = self.gpu.timed_graph(launch)
        return self.graphs[which]

    def loaded(self, library: str, symbol: str) -> Loaded:
        """Return a kernel that was called once: its first call may load a vendor's library, which a capture does not allow."""
        if (library, symbol) not in self.kernels:
            kernel = Loaded(library, symbol, kernel_of(load_library(Path(library), "cuda"), symbol))
            with self._on_stream():
                kernel.function(*(placed.tensor() for placed in self._shifted[0]))
            self.gpu.wait()
            self.kernels[library, symbol] = kernel
        return self.kernels[library, symbol]

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        """Have kernels launch on the device's stream."""
        stream: contextlib.AbstractContextManager[object] = tvm_ffi.use_raw_stream(
            tvm_ffi.device("cuda", self.gpu.ordinal), self.gpu.stream.value or 0
        )
        return stream

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
def checks() -> Checks:
    return Checks(device())
