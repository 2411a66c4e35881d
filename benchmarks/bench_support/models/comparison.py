"""Owns the comparison on one exported model: each contender is compared with float32 torch, then all are timed in turns.

Knows nothing of how libraries were built. Runs in a process of its own; needs torch, imported before TVM: it loads CUDA's runtime
library.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_support.models.timing import timed
from bench_support.models.zoo import example
from bench_support.own_process import first_line
from bench_support.table import quantiles

Row = dict[str, Any]
Call = Callable[[int], Any]
SETS = 4
"""Sets of inputs that calls rotate over."""
MODES: Mapping[str, Callable[[Any], Any]] = {
    "eager": lambda module: module,
    "compile": torch.compile,
    "max-autotune": lambda module: torch.compile(module, mode="max-autotune-no-cudagraphs"),
}
PROFILED_CALLS = 20


@dataclass(frozen=True)
class Job:
    """An exported model and its contenders."""

    model: str
    dtype: str
    libraries: Mapping[str, tuple[str, str]]
    """Library and artifact by contender; the artifact is empty where none is loaded."""
    onnx: str
    """ONNX file for onnxruntime; empty without."""
    rivals: Sequence[str]
    """Some of MODES, and onnxruntime."""
    l2_bytes: int
    """0 on a CPU."""
    rounds: int

    @property
    def device(self) -> str:
        return "cuda" if self.l2_bytes else "cpu"


def made(name: str, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a model and inputs in the dtype."""
    module, args = example(name).make()
    kind = getattr(torch, dtype)
    return module.to(kind), tuple(arg.to(kind) if arg.is_floating_point() else arg for arg in args)


def compare(job: Job) -> Row:
    """Return seconds, errors relative to torch in float32, and failures by contender."""
    module, args = example(job.model).make()
    with torch.no_grad():
        want = [each.double() for each in _outputs(module.to(job.device)(*(arg.to(job.device) for arg in args)))]
    del module
    row: Row = {"errors": {}, "failures": {}}
    calls: dict[str, Call] = {}
    for name, make in _contenders(job).items():
        try:
            call = make()
            row["errors"][name] = _error(call(0), want)
            calls[name] = call
        except Exception as error:  # noqa: BLE001  a contender that cannot be compared is a result
            row["failures"][name] = first_line(error)
    samples, failures = timed(calls, SETS, job.l2_bytes, job.rounds)
    row["failures"] |= failures
    return {**row, "secs": {name: quantiles(values)[1] for name, values in samples.items()}, "samples": samples}


def kernels(job: Job, name: str, entries: Mapping[str, str]) -> list[Row]:
    """Return the GPU's time for each kernel that a contender launches, longest first; `entries` are names by symbols."""
    from torch.profiler import ProfilerActivity, profile

    call = _contenders(job)[name]()
    for index in range(3):
        call(index % SETS)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for index in range(PROFILED_CALLS):
            call(index % SETS)
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for event in profiled.events():
        if "cuda" in str(event.device_type).lower():
            spent[_entry(event.name, entries)].append(event.device_time)
    rows = [
        {"kernel": kernel[:90], "us": sum(times) / PROFILED_CALLS, "launches": len(times) / PROFILED_CALLS}
        for kernel, times in spent.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _entry(kernel: str, entries: Mapping[str, str]) -> str:
    """Return a kernel's name with the symbol replaced by its entry's name; unchanged if it belongs to none."""
    for symbol, entry in entries.items():
        if kernel.startswith(symbol):
            return entry + kernel.removeprefix(symbol)
    return kernel


def _contenders(job: Job) -> Mapping[str, Callable[[], Call]]:
    module, args = made(job.model, job.dtype)
    sets = [tuple(arg.to(job.device, copy=True) for arg in args) for _ in range(SETS)]
    found: dict[str, Callable[[], Call]] = {
        name: lambda given=given: _library(*given, job.device, sets) for name, given in job.libraries.items()
    }
    modes = [mode for mode in MODES if mode in job.rivals]
    if modes:
        module, theirs = _as_cudnn_reads(module.to("cuda"), sets) if job.device == "cuda" else (module, sets)
        found |= {f"torch {mode}": lambda mode=mode: _torch(MODES[mode](module), theirs) for mode in modes}
    return found | ({"onnxruntime": lambda: _onnxruntime(job.onnx, sets)} if job.onnx and "onnxruntime" in job.rivals else {})


def _as_cudnn_reads(module: Any, sets: Sequence[tuple[Any, ...]]) -> tuple[Any, Sequence[tuple[Any, ...]]]:
    """Return a convolutional model and its images channels last, as convolutions on tensor cores read them; others as they are."""
    if not any(isinstance(each, torch.nn.Conv2d) for each in module.modules()):
        return module, sets
    layout = {"memory_format": torch.channels_last}
    return module.to(**layout), [tuple(arg.to(**layout) for arg in each) for each in sets]


def _library(library: str, artifact: str, device: str, sets: Sequence[tuple[Any, ...]]) -> Call:
    import tvm
    import tvm.relax
    import tvm_ffi

    from kerneldecl.relax import load_model

    on = tvm.cuda(0) if device == "cuda" else tvm.cpu()
    machine = load_model(library, artifact, on) if artifact else tvm.relax.VirtualMachine(tvm.runtime.load_module(library), on)
    main = machine["main"]
    tensors = [[tvm.runtime.from_dlpack(tensor) for tensor in each] for each in sets]

    def call(index: int) -> Any:
        if device == "cpu":
            return main(*tensors[index])
        with tvm_ffi.use_torch_stream():
            return main(*tensors[index])

    return call


def _torch(module: Any, sets: Sequence[tuple[Any, ...]]) -> Call:
    def call(index: int) -> Any:
        with torch.no_grad():
            return module(*sets[index])

    return call


def _onnxruntime(onnx: str, sets: Sequence[tuple[Any, ...]]) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    arrays = [dict(zip(names, (tensor.numpy() for tensor in each), strict=True)) for each in sets]
    return lambda index: [torch.from_numpy(each) for each in session.run(None, arrays[index])]


def _error(got: Any, want: Sequence[Any]) -> float:
    """Return the norm of the difference by the norm of what is wanted, the largest of all outputs."""
    outputs = [torch.from_dlpack(each).to(wanted.device).double() for each, wanted in zip(_outputs(got), want, strict=True)]
    return max(float((out - wanted).norm() / wanted.norm()) for out, wanted in zip(outputs, want, strict=True))


def _outputs(outputs: Any) -> list[Any]:
    return [outputs] if hasattr(outputs, "__dlpack__") else list(outputs)
