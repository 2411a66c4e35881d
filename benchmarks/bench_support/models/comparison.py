"""Owns the comparison on one exported model: ours, torch and onnxruntime, each compared with float32 torch, then timed in turns.

Knows nothing of how a library was built. Runs in a process of its own; needs torch, imported before TVM: it loads CUDA's runtime
library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_support.models.zoo import example
from bench_support.table import interleaved, quantiles

Row = dict[str, Any]
Call = Callable[[int], Any]
CPU_SAMPLE_SECS = 0.2
"""Shortest sample on a CPU."""
REST_SECS = 0.05
"""Seconds before a sample on a CPU: threads of the contender before, which spin while they wait for work, sleep by then."""
SETS = 4
"""Sets of inputs that calls rotate over."""


@dataclass(frozen=True)
class Job:
    """An exported model and its contenders."""

    model: str
    dtype: str
    library: str
    artifact: str
    onnx: str
    """ONNX file for onnxruntime; empty without."""
    rivals: Sequence[str]
    """torch's modes: eager, compile, max-autotune; onnxruntime."""
    device: str
    l2_bytes: int
    rounds: int


def made(name: str, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a model and inputs in the dtype."""
    module, args = example(name).make()
    kind = getattr(torch, dtype)
    return module.to(kind), tuple(arg.to(kind) if arg.is_floating_point() else arg for arg in args)


def export(name: str, dtype: str, folder: Path, *, to_onnx: bool) -> None:
    """Write model.pt2, as a user would, and model.onnx where it is asked for."""
    module, args = made(name, dtype)
    with torch.no_grad():
        torch.export.save(torch.export.export(module, args), folder / "model.pt2")
        if to_onnx:
            torch.onnx.export(module, args, str(folder / "model.onnx"), dynamo=True, external_data=False)


def compare(job: Job) -> Row:
    """Return seconds, errors relative to torch in float32, and failures by contender."""
    module, args = example(job.model).make()
    with torch.no_grad():
        want = [each.double() for each in _outputs(module.to(job.device)(*(arg.to(job.device) for arg in args)))]
    module, args = made(job.model, job.dtype)
    sets = [tuple(arg.to(job.device, copy=True) for arg in args) for _ in range(SETS)]
    row: Row = {"errors": {}, "failures": {}}
    samplers: dict[str, Callable[[], float]] = {}
    for name, make in _contenders(job, module.to(job.device), sets).items():
        try:
            call = make()
            row["errors"][name] = _error(call(0), want)
            samplers |= _samplers(name, call, job)
        except Exception as error:  # noqa: BLE001  a contender that cannot be compared is a result
            row["failures"][name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"
    samples = interleaved(samplers, job.rounds)
    row["secs"] = {name: quantiles(values)[1] for name, values in samples.items()}
    row["samples"] = samples
    return row


def _contenders(job: Job, module: Any, sets: Sequence[tuple[Any, ...]]) -> Mapping[str, Callable[[], Call]]:
    modes = {
        "eager": lambda: module,
        "compile": lambda: torch.compile(module),
        "max-autotune": lambda: torch.compile(module, mode="max-autotune-no-cudagraphs"),
    }
    found: dict[str, Callable[[], Call]] = {"ours": lambda: _ours(job, sets)}
    found |= {f"torch {mode}": lambda mode=mode: _torch(modes[mode](), sets) for mode in modes if mode in job.rivals}
    return found | ({"onnxruntime": lambda: _onnxruntime(job, sets)} if job.onnx and "onnxruntime" in job.rivals else {})


def _ours(job: Job, sets: Sequence[tuple[Any, ...]]) -> Call:
    import tvm
    import tvm_ffi

    from kerneldecl.relax import load_model

    main = load_model(job.library, job.artifact, tvm.cuda(0) if job.device == "cuda" else tvm.cpu())["main"]
    tensors = [[tvm.runtime.from_dlpack(tensor) for tensor in each] for each in sets]

    def call(index: int) -> Any:
        if job.device == "cpu":
            return main(*tensors[index])
        with tvm_ffi.use_torch_stream():
            return main(*tensors[index])

    return call


def _torch(module: Any, sets: Sequence[tuple[Any, ...]]) -> Call:
    def call(index: int) -> Any:
        with torch.no_grad():
            return module(*sets[index])

    return call


def _onnxruntime(job: Job, sets: Sequence[tuple[Any, ...]]) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(job.onnx, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    arrays = [dict(zip(names, (tensor.numpy() for tensor in each), strict=True)) for each in sets]
    return lambda index: [torch.from_numpy(each) for each in session.run(None, arrays[index])]


def _samplers(name: str, call: Call, job: Job) -> dict[str, Callable[[], float]]:
    if job.device == "cpu":
        return {name: _CpuCalls(call).secs}
    from bench_support.gpu.timing import Replay, flusher

    return {f"{name}, graph": Replay(call, SETS, flusher(job.l2_bytes)).secs}


class _CpuCalls:
    """Calls one after the other."""

    def __init__(self, call: Call) -> None:
        self._call, self._calls = call, 1
        self.secs()
        self._calls = max(1, round(CPU_SAMPLE_SECS / self.secs()))

    def secs(self) -> float:
        time.sleep(REST_SECS)
        self._call(0)
        start = time.perf_counter()
        for index in range(self._calls):
            self._call(index % SETS)
        return (time.perf_counter() - start) / self._calls


def _error(got: Any, want: Sequence[Any]) -> float:
    """Return the norm of the difference by the norm of what is wanted, the largest of all outputs."""
    outputs = [torch.from_dlpack(each).to(wanted.device).double() for each, wanted in zip(_outputs(got), want, strict=True)]
    return max(float((out - wanted).norm() / wanted.norm()) for out, wanted in zip(outputs, want, strict=True))


def _outputs(outputs: Any) -> list[Any]:
    return [outputs] if hasattr(outputs, "__dlpack__") else list(outputs)
