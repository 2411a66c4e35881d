"""Owns the timing of a compiled model: as a program calls it, in a CUDA graph, by kernel, and beside torch.

Knows nothing of how models are compiled, or of how figures are shown.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kerneldecl.arrays import Array
from kerneldecl.artifact.graph_starts import plain_starts
from kerneldecl.deploy.inputs import on_device
from kerneldecl.deploy.references import torch_call, torch_dtypes, torch_tensor
from kerneldecl.relax.deployment import Model

_ROUNDS = 7
_ROUND_SECS = 0.2
_LEAST_PROFILED, _MOST_PROFILED = 5, 100
_TORCH = "torch, threads: "
Call = Callable[[], object]


def bench(model: Model, function: str, arrays: Sequence[Array], against: str | None) -> dict[str, Any]:
    """Return seconds of a call: the model's, and torch's where `against` is a torch.export program and torch is installed.

    The two run in turns, so that a machine that grows slower meanwhile slows both.
    """
    is_gpu = model.device_kind == "cuda"
    run, given = model[function], on_device(arrays, model.device)

    def ours() -> None:
        run(*given)
        model.device.sync()

    calls: dict[str, Call] = {"secs": ours}
    why_not = ""
    if against is not None:
        of_torch, why_not = _torch_calls(against, arrays, is_gpu=is_gpu)
        calls |= of_torch
    if is_gpu and (graph := _graph(run, given)):
        calls["graph_secs"] = graph
    secs = _in_turns(calls)
    theirs = [secs.pop(name) for name in list(secs) if name.startswith(_TORCH)]
    return {
        "secs": secs["secs"],
        "graph_secs": secs.get("graph_secs"),
        "torch_secs": min(theirs, default=None),
        "why_no_torch": why_not,
        "kernels": _by_kernel(model, ours),
    }


def _in_turns(calls: dict[str, Call]) -> dict[str, float]:
    """Return each call's median time over rounds, after a first call that loads and allocates."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            samples[name].append(_secs_of_a_call(call))
    return {name: statistics.median(found) for name, found in samples.items()}


def _secs_of_a_call(call: Call) -> float:
    """Return the mean time of the calls that a round has time for, one at least."""
    begin, count, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < _ROUND_SECS:
        call()
        count, elapsed = count + 1, time.perf_counter() - begin
    return elapsed / count


def _torch_calls(program: str, arrays: Sequence[Array], *, is_gpu: bool) -> tuple[dict[str, Call], str]:
    """Return calls of a torch.export program, of which the fastest counts, or why there are none.

    On a CPU they are one with torch's threads and one with a single thread, which small models run faster with.
    """
    if not program.endswith(".pt2"):
        return {}, f"{program} is no torch.export program"
    try:
        import torch
    except ImportError:
        return {}, "torch is not installed"
    if is_gpu and not torch.cuda.is_available():
        return {}, "this torch has no CUDA"
    loaded = torch.export.load(program)
    dtypes = [array.dtype.name for array in arrays]
    if dtypes != (wanted := torch_dtypes(loaded)):
        return {}, f"{program} takes {', '.join(wanted)}, the model {', '.join(dtypes)}"
    module = loaded.module()
    tensors = [torch_tensor(array) for array in arrays]
    if is_gpu:
        module, tensors = module.cuda(), [each.cuda() for each in tensors]
    run = torch_call(loaded, module)

    def call(threads: int) -> None:
        torch.set_num_threads(threads)
        with torch.no_grad():
            run(tensors)
        if is_gpu:
            torch.cuda.synchronize()

    counts = {torch.get_num_threads()} if is_gpu else {torch.get_num_threads(), 1}
    return {f"{_TORCH}{count}": functools.partial(call, count) for count in counts}, ""


def _graph(run: Callable[..., Any], given: Sequence[Any]) -> Call | None:
    """Return the replay of a CUDA graph with one call in it; None without a torch that can capture one."""
    try:
        import torch
        import tvm_ffi
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream), tvm_ffi.use_torch_stream():
        run(*given)  # loads code and allocates what the graph uses
    with torch.cuda.graph(graph, stream=stream), tvm_ffi.use_torch_stream():
        kept = run(*given)
    plain_starts(graph.raw_cuda_graph())
    graph.instantiate()

    def call() -> object:
        graph.replay()
        torch.cuda.synchronize()
        return kept

    return call


def _by_kernel(model: Model, call: Call) -> list[dict[str, Any]]:
    """Return seconds and calls of each function that the virtual machine calls, the slowest first; each is waited for."""
    samples: list[dict[str, float]] = []
    counts: Counter[str] = Counter()
    begin = 0.0

    def hook(_function: Any, name: str, is_before: bool, _result: Any, *_arguments: Any) -> None:
        nonlocal begin
        if is_before:
            begin = time.perf_counter()
            return
        model.device.sync()
        samples[-1][name] = samples[-1].get(name, 0.0) + time.perf_counter() - begin
        counts[name] += 1

    call()
    model.instrument(hook)
    end = time.perf_counter() + _ROUND_SECS
    while len(samples) < _LEAST_PROFILED or (time.perf_counter() < end and len(samples) < _MOST_PROFILED):
        samples.append({})
        call()
    return shares(samples, counts)


def shares(samples: Sequence[Mapping[str, float]], counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return a row for each kernel, by the median of its time in a call: one call in which the machine did something else says nothing."""
    kernels = [name for name in counts if not name.startswith("vm.builtin.")]
    secs = {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in kernels}
    total = sum(secs.values())
    rows = [{"name": name, "secs": secs[name], "calls": counts[name] // len(samples), "share": secs[name] / total} for name in kernels]
    return sorted(rows, key=lambda row: -float(row["secs"]))
