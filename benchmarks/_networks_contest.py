"""Owns one network's contest on the GPU: ours, TVM's default schedules and torch, each verified, then timed in turns.

Knows nothing of how libraries were made. Runs in a process of its own; needs torch, imported before TVM: it brings CUDA's
runtime library.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _networks import Network

Row = dict[str, Any]
TOLERANCE = {"float16": 5e-2, "float32": 1e-3}
"""Relative to the largest and the usual result, of whole networks: rounding adds up over layers."""
CALLS = 20
"""Launched one after the other without a graph, in one sample, at most."""
SAMPLE_SECS = 0.02
"""Of one such sample, about: slow contenders are called fewer times."""


@dataclass(frozen=True)
class Contest:
    """What is to be compared on a network."""

    network: Network
    libraries: Mapping[str, tuple[str, str]]
    """Models by contender: library, and the artifact to be loaded beside it or nothing."""
    modes: Sequence[str]
    """Of torch: eager, compile, max-autotune."""
    l2_bytes: int
    rounds: int
    entries: Mapping[str, str]
    """Of the kernels' symbols, for `kernels`."""


class Given:
    """A network's arguments on the GPU, the inputs as often as timing rotates over them."""

    def __init__(self, contest: Contest) -> None:
        import torch
        from _gpu_timing import copies_of
        from _networks import Weights
        from _networks_torch import TorchOps, own_layout

        network = contest.network
        made = Weights(network.dtype)
        arrays = {name: torch.from_numpy(array).cuda() for name, array in network.arrays().items()}
        # Running it says which weights there are, in the order in which they are the module's arguments.
        network.build(TorchOps(), arrays, lambda name, shape: own_layout(torch.from_numpy(made(name, shape)).cuda()))
        self.weights = {name: torch.from_numpy(array).cuda() for name, array in made.arrays.items()}
        self.fixed = {name: arrays[name] for name in network.fixed}
        inputs = [arrays[name] for name in network.inputs]
        nbytes = sum(tensor.nbytes for tensor in (*inputs, *self.weights.values()))
        self.sets = [[tensor.clone() for tensor in inputs] for _ in range(min(8, copies_of(nbytes, contest.l2_bytes)))]

    def all(self, index: int) -> list[Any]:
        """Return all arguments of a Relax module's `main`."""
        return [*self.sets[index], *self.fixed.values(), *self.weights.values()]


def held(contest: Contest) -> Row:
    """Hold the contest; return seconds, error and what failed, by contender."""
    import torch
    from _gpu_timing import Replay, flusher
    from _table import quantiles, take_turns

    given = Given(contest)
    want = _torch_call(contest, given, "eager", dtype="float32")(0).double()
    flush = flusher(contest.l2_bytes)
    samplers: dict[str, Callable[[], float]] = {}
    row: Row = {"failures": {}, "errors": {}, "start_secs": {}}
    for name, make in _contenders(contest, given).items():
        try:
            start = time.perf_counter()
            call = make()
            row["errors"][name] = _checked(call(0), want, contest.network.dtype)
            torch.cuda.synchronize()
            row["start_secs"][name] = time.perf_counter() - start
            samplers[name] = _Launches(call, len(given.sets), flush).secs
            # Some compilers take minutes: who stops the contest keeps this.
            print(f"  {name}: ready in {row['start_secs'][name]:.1f} s, takes {samplers[name]() * 1e3:.3f} ms", flush=True)
            samplers[f"{name}, graph"] = Replay(call, len(given.sets), flush).secs
        except Exception as error:  # noqa: BLE001  that a contender cannot compete is a result
            row["failures"][name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"
    samples = take_turns(samplers, contest.rounds)
    row["secs"] = {name: quantiles(values)[1] for name, values in samples.items()}
    row["samples"] = samples
    return row


def _checked(got: Any, want: Any, dtype: str) -> float:
    import torch
    from _gpu_torch import relative_error

    error = relative_error(torch.from_dlpack(got), want)
    if not error <= TOLERANCE[dtype]:
        raise ValueError(f"wrong: relative error {error:.3g} over {TOLERANCE[dtype]:.3g}")
    return error


def _contenders(contest: Contest, given: Given) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        name: lambda library=library, artifact=artifact: tvm_call(library, artifact, given)
        for name, (library, artifact) in contest.libraries.items()
    }
    return found | {f"torch {mode}": lambda mode=mode: _torch_call(contest, given, mode) for mode in contest.modes}


def tvm_call(library: str, artifact: str, given: Given) -> Callable[[int], Any]:
    """Return a call of a model's virtual machine on torch's current stream."""
    import tvm
    import tvm.support.nvcc  # where TVM exports device code as a source, it is compiled when it is loaded
    import tvm_ffi

    from kerneldecl.relax import load_model

    main = load_model(library, artifact or None, tvm.cuda(0))["main"]
    sets = [[tvm.runtime.from_dlpack(tensor) for tensor in given.all(index)] for index in range(len(given.sets))]

    def call(index: int) -> Any:
        with tvm_ffi.use_torch_stream():
            return main(*sets[index])

    return call


def _torch_call(contest: Contest, given: Given, mode: str, dtype: str = "") -> Callable[[int], Any]:
    import torch
    from _networks_torch import TorchNetwork

    def cast(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tensor.to(getattr(torch, dtype or contest.network.dtype)) for name, tensor in tensors.items()}

    network: Any = TorchNetwork(contest.network, cast(given.weights), cast(given.fixed)).cuda()
    compiled = {"eager": lambda: network, "compile": lambda: torch.compile(network)}
    module = compiled.get(mode, lambda: torch.compile(network, mode="max-autotune-no-cudagraphs"))()

    def call(index: int) -> Any:
        with torch.no_grad():
            return module(*cast(dict(enumerate(given.sets[index]))).values())  # type: ignore[arg-type]

    return call


class _Launches:
    """Calls one after the other: what a program without a graph waits, the launches' own time included."""

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


def kernels(contest: Contest, name: str) -> list[Row]:
    """Return the GPU's time of each kernel that a contender launches, summed by kernel, longest first."""
    from torch.profiler import ProfilerActivity, profile

    given = Given(contest)
    call = _contenders(contest, given)[name]()
    for index in range(3):
        call(index % len(given.sets))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for index in range(CALLS):
            call(index % len(given.sets))
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for event in profiled.events():
        if "cuda" in str(event.device_type).lower():
            spent[_entry(event.name, contest.entries)].append(event.device_time)
    rows = [{"kernel": kernel[:90], "us": sum(times) / CALLS, "launches": len(times) / CALLS} for kernel, times in spent.items()]
    return sorted(rows, key=lambda row: -row["us"])


def _entry(kernel: str, entries: Mapping[str, str]) -> str:
    """Return the name of the entry that a kernel is of, with what follows the symbol; the kernel's own where it is of none."""
    for symbol, entry in entries.items():
        if kernel.startswith(symbol):
            return entry + kernel.removeprefix(symbol)
    return kernel
