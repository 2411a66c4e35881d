"""Owns the comparison on one network: ours, TVM's default schedules and torch, each verified, then timed, interleaved.

Knows nothing of how libraries were built. Runs in a process of its own; needs torch, imported before TVM: it loads CUDA's
runtime library.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench_support.networks.definitions import Network

Row = dict[str, Any]
TOLERANCE = {"float16": 5e-2, "float32": 1e-3}
"""Relative error allowed of a whole network, over whose layers rounding accumulates."""
CALLS = 20
"""Most calls in a sample without a CUDA graph."""
SAMPLE_SECS = 0.02
"""Approximate seconds of a sample without a CUDA graph: slow contenders are called fewer times."""


@dataclass(frozen=True)
class Job:
    """A network with the contenders to compare."""

    network: Network
    libraries: Mapping[str, tuple[str, str]]
    """Library and artifact by contender; the artifact is empty where none is loaded."""
    modes: Sequence[str]
    """torch's modes: eager, compile, max-autotune."""
    l2_bytes: int
    rounds: int
    entries: Mapping[str, str]
    """Names of entries by their kernels' symbols, for `kernels`."""


class Arguments:
    """A network's arguments on the GPU, with several sets of inputs, over which timing rotates."""

    def __init__(self, job: Job) -> None:
        import torch
        from bench_support.gpu.timing import copies_of
        from bench_support.networks.definitions import Weights
        from bench_support.networks.torch_ops import TorchOps, own_layout

        network = job.network
        weights = Weights(network.dtype)
        arrays = {name: torch.from_numpy(array).cuda() for name, array in network.arrays().items()}
        # Running the network collects its weights, in the order of the module's arguments.
        network.build(TorchOps(), arrays, lambda name, shape: own_layout(torch.from_numpy(weights(name, shape)).cuda()))
        self.weights = {name: torch.from_numpy(array).cuda() for name, array in weights.arrays.items()}
        self.fixed = {name: arrays[name] for name in network.fixed}
        inputs = [arrays[name] for name in network.inputs]
        nbytes = sum(tensor.nbytes for tensor in (*inputs, *self.weights.values()))
        self.sets = [[tensor.clone() for tensor in inputs] for _ in range(min(8, copies_of(nbytes, job.l2_bytes)))]

    def all(self, index: int) -> list[Any]:
        """Return all arguments of a Relax module's `main`."""
        return [*self.sets[index], *self.fixed.values(), *self.weights.values()]


def compare(job: Job) -> Row:
    """Return seconds, error and failures by contender."""
    import torch
    from bench_support.gpu.timing import Replay, flusher
    from bench_support.table import interleaved, quantiles

    arguments = Arguments(job)
    want = _torch_call(job, arguments, "eager", dtype="float32")(0).double()
    flush = flusher(job.l2_bytes)
    samplers: dict[str, Callable[[], float]] = {}
    row: Row = {"failures": {}, "errors": {}, "start_secs": {}}
    for name, make in _contenders(job, arguments).items():
        try:
            start = time.perf_counter()
            call = make()
            row["errors"][name] = _checked(call(0), want, job.network.dtype)
            torch.cuda.synchronize()
            row["start_secs"][name] = time.perf_counter() - start
            samplers[name] = _Launches(call, len(arguments.sets), flush).secs
            # Some compilers take minutes: this remains if the comparison is stopped.
            print(f"  {name}: ready in {row['start_secs'][name]:.1f} s, takes {samplers[name]() * 1e3:.3f} ms", flush=True)
            samplers[f"{name}, graph"] = Replay(call, len(arguments.sets), flush).secs
        except Exception as error:  # noqa: BLE001  a contender that cannot be compared is a result
            row["failures"][name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"
    samples = interleaved(samplers, job.rounds)
    row["secs"] = {name: quantiles(values)[1] for name, values in samples.items()}
    row["samples"] = samples
    return row


def _checked(got: Any, want: Any, dtype: str) -> float:
    import torch
    from bench_support.gpu.torch_baselines import relative_error

    error = relative_error(torch.from_dlpack(got), want)
    if not error <= TOLERANCE[dtype]:
        raise ValueError(f"wrong: relative error {error:.3g} over {TOLERANCE[dtype]:.3g}")
    return error


def _contenders(job: Job, arguments: Arguments) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        name: lambda library=library, artifact=artifact: tvm_call(library, artifact, arguments)
        for name, (library, artifact) in job.libraries.items()
    }
    return found | {f"torch {mode}": lambda mode=mode: _torch_call(job, arguments, mode) for mode in job.modes}


def tvm_call(library: str, artifact: str, arguments: Arguments) -> Callable[[int], Any]:
    """Return a call of a model's virtual machine on torch's current stream."""
    import tvm
    import tvm.support.nvcc  # compiles device code that TVM has exported as source, when it is loaded
    import tvm_ffi

    from kerneldecl.relax import load_model

    main = load_model(library, artifact or None, tvm.cuda(0))["main"]
    sets = [[tvm.runtime.from_dlpack(tensor) for tensor in arguments.all(index)] for index in range(len(arguments.sets))]

    def call(index: int) -> Any:
        with tvm_ffi.use_torch_stream():
            return main(*sets[index])

    return call


def _torch_call(job: Job, arguments: Arguments, mode: str, dtype: str = "") -> Callable[[int], Any]:
    import torch
    from bench_support.networks.torch_ops import TorchNetwork

    def cast(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tensor.to(getattr(torch, dtype or job.network.dtype)) for name, tensor in tensors.items()}

    network: Any = TorchNetwork(job.network, cast(arguments.weights), cast(arguments.fixed)).cuda()
    compiled = {"eager": lambda: network, "compile": lambda: torch.compile(network)}
    module = compiled.get(mode, lambda: torch.compile(network, mode="max-autotune-no-cudagraphs"))()

    def call(index: int) -> Any:
        with torch.no_grad():
            return module(*cast(dict(enumerate(arguments.sets[index]))).values())  # type: ignore[arg-type]

    return call


class _Launches:
    """Calls one after the other without a graph: their time includes that of the launches."""

    def __init__(self, call: Callable[[int], Any], copies: int, flush: Callable[[], object]) -> None:
        self._call, self._copies, self._flush, self._calls = call, copies, flush, 1
        for index in range(2):
            call(index % copies)
        self._calls = max(1, min(CALLS, math.ceil(SAMPLE_SECS / self.secs())))

    def secs(self) -> float:
        import torch

        self._flush()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for index in range(self._calls):
            self._call(index % self._copies)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / self._calls


def kernels(job: Job, name: str) -> list[Row]:
    """Return the GPU's time for each kernel that a contender launches, longest first."""
    from torch.profiler import ProfilerActivity, profile

    arguments = Arguments(job)
    call = _contenders(job, arguments)[name]()
    for index in range(3):
        call(index % len(arguments.sets))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for index in range(CALLS):
            call(index % len(arguments.sets))
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for event in profiled.events():
        if "cuda" in str(event.device_type).lower():
            spent[_entry(event.name, job.entries)].append(event.device_time)
    rows = [{"kernel": kernel[:90], "us": sum(times) / CALLS, "launches": len(times) / CALLS} for kernel, times in spent.items()]
    return sorted(rows, key=lambda row: -row["us"])


def _entry(kernel: str, entries: Mapping[str, str]) -> str:
    """Return a kernel's name with the symbol replaced by its entry's name; unchanged if it belongs to none."""
    for symbol, entry in entries.items():
        if kernel.startswith(symbol):
            return entry + kernel.removeprefix(symbol)
    return kernel
