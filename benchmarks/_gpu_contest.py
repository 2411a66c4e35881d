"""Owns one workload's contest on the GPU: every contender verified, then timed in turns.

Knows nothing of how kernels were built or of what figures are asked. Runs in a process of its own (`GpuProcess`), which
dies with a kernel that breaks it. Needs torch, imported before TVM: it brings CUDA's runtime library.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from _gpu_kernels import Built, Case

if TYPE_CHECKING:
    from _gpu_timing import Call, Replay
    from _gpu_torch import Args

Row = dict[str, Any]
OURS = ("best", "first")
PHASES = ("inputs", "contenders", "contest")
LONG_SECS = 1e-4
"""Kernels that take longer may be held back by power: it is told what each does alone, too."""
ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, KeyError)
"""What a contender that cannot compete raises: torch's, TVM's and Triton's errors among them."""


@dataclass(frozen=True)
class Job:
    """A workload with what is to be compared on it."""

    case: Case
    best: Built
    """Of all candidates."""
    first: Built
    """The model's first choice; may be the same."""
    default: Built | None
    """TVM's own schedule."""
    rivals: frozenset[str]
    """Of torch and triton."""
    rounds: int


@dataclass(frozen=True)
class Ring:
    """A workload's arguments on the GPU, as often as timing rotates over them, and what its outputs should be."""

    sets: Sequence[Args]
    want: Any
    tolerance: float
    flush: Callable[[], object]

    def error(self, call: Call) -> float:
        """Return a contender's relative error; raise ValueError if it is over the tolerance."""
        import torch
        from _gpu_torch import poison, relative_error

        from kerneldecl.rule import dtype_tolerance

        poison(self.sets[0][-1])
        got = call(0)
        torch.cuda.synchronize()
        error = relative_error(got, self.want)
        # A contender may have narrower outputs than the rule: torch's product with 4-bit weights has.
        limit = max(self.tolerance, dtype_tolerance(str(got.dtype).removeprefix("torch.")))
        if not error <= limit:
            raise ValueError(f"wrong: relative error {error:.3g} over {limit:.3g}")
        return error

    def replay(self, call: Call) -> Replay:
        from _gpu_timing import Replay

        return Replay(call, len(self.sets), self.flush)


def ring_of(case: Case) -> Ring:
    """Return the arguments of a workload; the reference is torch's in float64, else the rule's own."""
    import numpy as np
    import torch
    from _gpu_timing import copies_of, flusher
    from _gpu_torch import dtype_of, inputs_of, reference

    from kerneldecl.plugins.load import load_rule

    attrs = dict(case.workload.attrs)
    rule = load_rule(case.root, case.workload.rule).of(case.root, attrs)
    inputs = inputs_of(case.workload.rule, rule, attrs)
    try:
        want = reference(case.workload.rule, attrs, inputs)
    except KeyError:
        want = torch.from_numpy(np.asarray(rule.reference(*(x.cpu().numpy() for x in inputs)))).cuda()
    (out,) = rule.signature().outputs
    l2_bytes = case.arch.the_gpu.l2_bytes
    sets = [
        [*(x.clone() for x in inputs), torch.empty(out.shape, dtype=dtype_of(out), device="cuda")]
        for _ in range(copies_of(rule.least_bytes(), l2_bytes))
    ]
    tolerance = case.workload.tolerance if case.workload.tolerance is not None else rule.tolerance()
    return Ring(sets, want, tolerance, flusher(l2_bytes))


def kernel_call(built: Built, sets: Sequence[Args]) -> Call:
    """Return a call of a library's kernel on torch's current stream."""
    import tvm  # noqa: F401  its runtime launches kernels
    import tvm_ffi

    from kerneldecl.artifact.kernels import Placed

    kernel = tvm_ffi.load_module(built.library)[built.symbol]
    rows = [(x[None], w, y[None]) for w, x, y in sets] if built.takes_row else sets
    placed = [[_placed(argument) for argument in args] for args in rows]
    given = [[argument.tensor() if isinstance(argument, Placed) else argument for argument in args] for args in placed]

    def call(i: int) -> Any:
        with tvm_ffi.use_torch_stream():
            kernel(*given[i])
        return sets[i][-1]

    call.placed = placed  # type: ignore[attr-defined]  # what tensors are made of must outlive them

    return call


def _placed(argument: Any) -> Any:
    """Return a torch tensor as a kernel takes it, or as what that is made of: torch does not export its tensors in float8."""
    from kerneldecl.artifact.kernels import Placed
    from kerneldecl.model import Arg

    dtype = str(argument.dtype).removeprefix("torch.")
    return Placed(Arg("", tuple(argument.shape), dtype), argument.data_ptr(), Placed.CUDA) if dtype.startswith("float8") else argument


def held(job: Job) -> Row:
    """Hold the contest and return what came of it: seconds of the best and, by rival, seconds, ratio and error.

    Raise ValueError if the best candidate is wrong.
    """
    from _gpu_timing import alone, contest, median, ratio

    laps = [time.perf_counter()]
    ring = ring_of(job.case)
    laps.append(time.perf_counter())
    calls = {name: kernel_call(built, ring.sets) for name, built in zip(OURS, (job.best, job.first), strict=True)}
    errors = {name: ring.error(call) for name, call in calls.items()}
    failures: dict[str, str] = {}
    for name, make in _rivals(job, ring).items():
        try:
            call = make()
            errors[name] = ring.error(call)
            calls[name] = call
        except ERRORS as error:
            failures[name] = _first_line(error)
    # All have run before one is captured: a graph keeps the addresses of workspaces, and a larger one may displace them.
    replays = {name: ring.replay(calls.pop(name)) for name in OURS}
    for name, call in calls.items():
        try:
            replays[name] = ring.replay(call)
        except ERRORS as error:
            failures[name] = _first_line(error)
    laps.append(time.perf_counter())
    samples = contest(replays, job.rounds)
    steady: dict[str, float] = {}
    if median(samples["best"]) > LONG_SECS:
        steady = {name: alone(replay) for name, replay in replays.items() if name == "best" or name.startswith("torch ")}
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
        "alone": steady,
        "phase_secs": dict(zip(PHASES, (end - begin for begin, end in itertools.pairwise(laps)), strict=True)),
    }


def described(case: Case) -> Row:
    """Return what is known of a workload before anything is run."""
    from kerneldecl.plugins.load import load_rule

    attrs = dict(case.workload.attrs)
    rule = load_rule(case.root, case.workload.rule).of(case.root, attrs)
    size = {"flops": rule.flops(), "least_bytes": rule.least_bytes()}
    return {"entry": case.name, "rule": case.workload.rule, "attrs": attrs, "tags": case.workload.tags, **size}


def _rivals(job: Job, ring: Ring) -> dict[str, Callable[[], Call]]:
    rule, attrs = job.case.workload.rule, dict(job.case.workload.attrs)
    found: dict[str, Callable[[], Call]] = {}
    if "torch" in job.rivals:
        from _gpu_torch import ways

        found |= {f"torch {name}": lambda call=call: call for name, call in ways(rule, attrs, ring.sets).items()}
    if "triton" in job.rivals:
        from _gpu_triton import ways as triton_ways

        found |= {name: lambda call=call: call for name, call in triton_ways(rule, attrs, ring.sets).items()}
    if job.default is not None:
        default = job.default
        found["dlight"] = lambda: kernel_call(_usable(default), ring.sets)
    return found


def _usable(built: Built) -> Built:
    if not built.library:
        raise ValueError(built.failure)
    return built


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


def add_bytes_per_s(case: Case) -> float:
    """Return what torch's addition of two float16 matrices of 16384 x 16384 moves: the practical ceiling of memory-bound work."""
    import torch
    from _gpu_timing import Replay, flusher, median

    x, z, y = (torch.randn(16384, 16384, device="cuda", dtype=torch.float16) for _ in range(3))
    replay = Replay(lambda _: torch.add(x, z, out=y), 1, flusher(case.arch.the_gpu.l2_bytes))
    return 3 * x.nbytes / median([replay.secs() for _ in range(9)])


def gpu_described() -> Row:
    """Return which GPU this is and with which libraries."""
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


class GpuProcess:
    """The process that uses the GPU. One that a kernel has broken is replaced when it is asked next."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._ours: Any = None

    def ask(self, question: Callable[..., Any], *given: Any, limit_secs: float = 180.0) -> Any:
        """Return the answer; raise RuntimeError with what went wrong if there is none, and start afresh with the next question."""
        if self._process is None:
            self._ours, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._ours.send((question, given))
        answer: Any = RuntimeError(f"no answer within {limit_secs:.0f} s")
        if self._ours.poll(limit_secs):
            try:
                answer = self._ours.recv()
            except (EOFError, ConnectionResetError):
                answer = RuntimeError("the process that uses the GPU died")
        if isinstance(answer, RuntimeError):
            self.close()
            raise answer
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(questions: Any) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    while True:
        question, given = questions.recv()
        try:
            answer = question(*given)
        except Exception as error:  # noqa: BLE001  told to who asked
            answer = RuntimeError(_first_line(error))
        torch.cuda.empty_cache()
        questions.send(answer)
