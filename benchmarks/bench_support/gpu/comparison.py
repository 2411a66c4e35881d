"""Owns the comparison on one workload: every contender is verified, then all are timed, interleaved.

Knows nothing of how kernels were built or of goals. Arguments and calls serve CPUs as well. Runs in a process of its own
(`OwnProcess`), which dies with a kernel that breaks it. Needs torch, imported before TVM: it loads CUDA's runtime library.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench_support.gpu.kernels import Built, Entry
from bench_support.own_process import first_line

if TYPE_CHECKING:
    from bench_support.gpu.timing import Call, Replay
    from bench_support.gpu.torch_rules import Args

    from kerneldecl.rule import Rule

Row = dict[str, Any]
OURS = ("best", "first")
PHASES = ("inputs", "contenders", "comparison")
LONG_SECS = 1e-4
"""Kernels that take longer may be limited by power: they are also timed each by itself."""
BEHIND_ROUNDS = 9
"""Rounds of the protocols in which each launch stands behind a small kernel."""
ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, KeyError)
"""Errors of torch, TVM and Triton that exclude a contender."""


@dataclass(frozen=True)
class Job:
    """A workload with the kernels to compare."""

    entry: Entry
    best: Built
    """The fastest candidate."""
    first: Built
    """The model's first choice; may be the fastest."""
    default: Built | None
    """TVM's own schedule."""
    rivals: frozenset[str]
    """Some of torch, triton and triton30."""
    rounds: int


@dataclass(frozen=True)
class Arguments:
    """A workload's argument sets, over which timing rotates, and the expected outputs."""

    sets: Sequence[Args]
    wants: Sequence[Any]
    """The expected outputs, all or the first: which of equal elements come first is not compared."""
    outputs: int
    """Outputs of a kernel."""
    tolerance: float
    rows_vary: bool
    """Whether errors are relative to the size of their row, as `Rule.rows_vary` says."""
    flush: Callable[[], object]

    def error(self, call: Call) -> float:
        """Return a contender's relative error; raise ValueError if it is over the tolerance."""
        import torch
        from bench_support.gpu.torch_references import poison, relative_error

        from kerneldecl.rule import dtype_tolerance

        for out in self.sets[0][-self.outputs :]:
            poison(out)
        found = call(0)
        several = found if isinstance(found, tuple) else (found,)
        if several[0].is_cuda:
            torch.cuda.synchronize()
        error = max(relative_error(got, want, rows_vary=self.rows_vary) for got, want in zip(several, self.wants, strict=False))
        # A contender may have narrower outputs than the rule, as torch's GEMV with 4-bit weights.
        limit = max(self.tolerance, *(dtype_tolerance(str(got.dtype).removeprefix("torch.")) for got in several[: len(self.wants)]))
        if not error <= limit:
            raise ValueError(f"wrong: relative error {error:.3g} over {limit:.3g}")
        return error

    def replay(self, call: Call) -> Replay:
        from bench_support.gpu.timing import Replay

        return Replay(call, len(self.sets), self.flush)


def arguments_of(entry: Entry) -> Arguments:
    """Return the arguments of a workload, on a CPU one set, with inputs whose results are in range.

    The reference is torch's in float64, or the rule's own where torch has none.
    """
    import torch
    from bench_support.gpu.timing import copies_of, flusher
    from bench_support.gpu.torch_ranges import within_range
    from bench_support.gpu.torch_references import dtype_of, inputs_of

    from kerneldecl.plugins.load import load_rule

    attrs = dict(entry.workload.attrs)
    rule = load_rule(entry.root, entry.workload.rule).of(entry.root, attrs)
    gpu = entry.arch.gpu
    device = "cuda" if gpu else "cpu"
    outputs = rule.signature().outputs
    made = inputs_of(entry.workload.rule, rule, attrs, device)
    inputs, wants = within_range(made, lambda inputs: _wants(entry.workload.rule, rule, attrs, inputs), outputs)
    sets = [
        [*(x.clone() for x in inputs), *(torch.empty(out.shape, dtype=dtype_of(out), device=device) for out in outputs)]
        for _ in range(copies_of(rule.least_bytes(), gpu.l2_bytes) if gpu else 1)
    ]
    tolerance = entry.workload.tolerance if entry.workload.tolerance is not None else rule.tolerance()
    return Arguments(sets, wants, len(outputs), tolerance, rule.rows_vary(), flusher(gpu.l2_bytes) if gpu else lambda: None)


def _wants(rule_name: str, rule: Rule, attrs: Mapping[str, Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the expected outputs, all or the first, where the inputs are."""
    import numpy as np
    from bench_support.gpu.torch_references import reference, tensor_of

    try:
        found = reference(rule_name, attrs, inputs)
    except KeyError:
        computed = rule.reference(*map(_on_host, inputs))
        several = [computed] if isinstance(computed, np.ndarray) else computed
        return tuple(tensor_of(np.asarray(want)).to(inputs[0].device) for want in several)
    return found if isinstance(found, tuple) else (found,)


def _on_host(tensor: Any) -> Any:
    """Return a torch tensor as an array, also of dtypes that torch does not export to NumPy."""
    import torch

    from kerneldecl.arrays import numpy_dtype

    dtype = numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return tensor.cpu().view(bits).numpy().view(dtype)


def kernel_call(built: Built, sets: Sequence[Args], outputs: int = 1) -> Call:
    """Return a call of a library's kernel of so many outputs, on a GPU on torch's current stream."""
    import tvm  # noqa: F401  its runtime launches kernels
    import tvm_ffi

    from kerneldecl.artifact.kernels import Placed
    from kerneldecl.artifact.thread_pool import leave_unbound

    leave_unbound()  # as for those who load an artifact
    kernel = tvm_ffi.load_module(built.library)[built.symbol]
    rows = [(x[None], w, y[None]) for w, x, y in sets] if built.takes_row else sets
    placed = [[_placed(argument) for argument in args] for args in rows]
    given = [[argument.tensor() if isinstance(argument, Placed) else argument for argument in args] for args in placed]

    def call(i: int) -> Any:
        with tvm_ffi.use_torch_stream() if sets[i][-1].is_cuda else nullcontext():
            kernel(*given[i])
        return sets[i][-1] if outputs == 1 else tuple(sets[i][-outputs:])

    call.placed = placed  # type: ignore[attr-defined]  # keeps the tensors' memory alive

    return call


def _placed(argument: Any) -> Any:
    """Return a torch tensor, or in float8, which torch does not export, its memory as `Placed`."""
    from kerneldecl.artifact.kernels import Placed
    from kerneldecl.signature import Arg

    dtype = str(argument.dtype).removeprefix("torch.")
    return Placed(Arg("", tuple(argument.shape), dtype), argument.data_ptr(), Placed.CUDA) if dtype.startswith("float8") else argument


def compare(job: Job) -> Row:
    """Return seconds of the best candidate and, by rival, seconds, ratio and error; raise ValueError if the best is wrong."""
    from bench_support.gpu.timing import interleaved, median, ratio

    laps = [time.perf_counter()]
    arguments = arguments_of(job.entry)
    laps.append(time.perf_counter())
    calls = {name: kernel_call(built, arguments.sets, arguments.outputs) for name, built in zip(OURS, (job.best, job.first), strict=True)}
    errors = {name: arguments.error(call) for name, call in calls.items()}
    failures: dict[str, str] = {}
    for name, make in _rivals(job, arguments).items():
        try:
            call = make()
            errors[name] = arguments.error(call)
            calls[name] = call
        except ERRORS as error:
            failures[name] = first_line(error)
    # All have run before one is captured: a graph keeps the addresses of workspaces, and a larger one may displace them.
    replays = {name: arguments.replay(calls[name]) for name in OURS}
    for name, call in calls.items():
        if name in OURS:
            continue
        try:
            replays[name] = arguments.replay(call)
        except ERRORS as error:
            failures[name] = first_line(error)
    laps.append(time.perf_counter())
    samples = interleaved(replays, job.rounds)
    judged = [name for name in replays if name in {"best", "dlight"} or name.startswith("torch ")]
    secs = {name: median(samples[name]) for name in judged}
    protocols = _by_protocol({name: replays[name] for name in judged}, secs, calls, arguments)
    laps.append(time.perf_counter())
    rivals = {
        name: {"secs": median(samples[name]), "ratio": ratio(samples[name], samples["best"]), "error": errors[name]}
        for name in replays
        if name not in OURS
    }
    return {
        "secs": median(samples["best"]),
        "first_share": 1.0 if job.best == job.first else 1 / ratio(samples["first"], samples["best"]),
        "error": errors["best"],
        "rivals": rivals,
        "rival_failures": failures,
        "samples": samples,
        "protocols": protocols,
        "phase_secs": dict(zip(PHASES, (end - begin for begin, end in itertools.pairwise(laps)), strict=True)),
    }


def _by_protocol(
    replays: Mapping[str, Replay], secs: Mapping[str, float], calls: Mapping[str, Call], arguments: Arguments
) -> dict[str, dict[str, float]]:
    """Return seconds by contender under each protocol of `kerneldecl.timing`.

    Back to back, a kernel whose power limits no clock takes what it takes in turns with the others: `secs`.
    """
    from bench_support.gpu.timing import Behind, alone, median, neighbours, rested

    is_long = secs["best"] > LONG_SECS
    found = {
        "cool": {name: rested(replay) if is_long else secs[name] for name, replay in replays.items()},
        "steady": {name: alone(replay) if is_long else secs[name] for name, replay in replays.items()},
    }
    for protocol, neighbour in neighbours().items():
        behind = {name: Behind(calls[name], neighbour, (len(arguments.sets), arguments.flush)) for name in replays}
        rounds = [{name: each.secs() for name, each in behind.items()} for _ in range(BEHIND_ROUNDS)]
        found[protocol] = {name: median([each[name] for each in rounds]) for name in behind}
    return found


def described(entry: Entry) -> Row:
    """Return the fields of a workload's row that are known before anything is run."""
    from kerneldecl.plugins.load import load_rule

    attrs = dict(entry.workload.attrs)
    rule = load_rule(entry.root, entry.workload.rule).of(entry.root, attrs)
    size = {"flops": rule.flops(), "least_bytes": rule.least_bytes()}
    return {"entry": entry.name, "rule": entry.workload.rule, "attrs": attrs, "tags": entry.workload.tags, **size}


def _rivals(job: Job, arguments: Arguments) -> dict[str, Callable[[], Call]]:
    rule, attrs = job.entry.workload.rule, dict(job.entry.workload.attrs)
    found: dict[str, Callable[[], Call]] = {}
    if "torch" in job.rivals:
        from bench_support.gpu.torch_baselines import baselines

        found |= {f"torch {name}": lambda call=call: call for name, call in baselines(rule, attrs, arguments.sets).items()}
    if wanted := sorted(job.rivals & {"triton", "triton30"}):
        from bench_support.gpu.triton_baselines import baselines as triton_baselines

        found |= {name: lambda call=call: call for name, call in triton_baselines(rule, attrs, arguments.sets, wanted[-1]).items()}
    if job.default is not None:
        default = job.default
        found["dlight"] = lambda: kernel_call(_usable(default), arguments.sets, arguments.outputs)
    return found


def _usable(built: Built) -> Built:
    if not built.library:
        raise ValueError(built.failure)
    return built


def add_bytes_per_s(entry: Entry) -> float:
    """Return what torch's addition of two float16 matrices of 16384 x 16384 moves: the measured peak of memory-bound kernels."""
    import torch
    from bench_support.gpu.timing import Replay, flusher, median

    x, z, y = (torch.randn(16384, 16384, device="cuda", dtype=torch.float16) for _ in range(3))
    replay = Replay(lambda _: torch.add(x, z, out=y), 1, flusher(entry.arch.the_gpu.l2_bytes))
    return 3 * x.nbytes / median([replay.secs() for _ in range(9)])


def gpu_described() -> Row:
    """Return the GPU's name and the versions of libraries."""
    import torch
    import tvm

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sm_count": properties.multi_processor_count,
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "tvm": tvm.__version__,
    }
