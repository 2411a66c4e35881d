"""Owns the comparison of tuned kernels with NumPy on the host CPU, operator by operator.

Knows nothing of how candidates are chosen: it builds a workspace of its own through the public interface and calls the
kernels with NumPy arrays.

Calls of kernel and NumPy alternate in one process, on the same arrays, with preallocated outputs and equal numbers of
threads.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_support.table import machine, quantiles, show, show_machine, write_json

if TYPE_CHECKING:  # NumPy's BLAS counts its threads when it is imported, which must not happen before main()
    from kerneldecl.artifact.load import Artifact
    from kerneldecl.tuning.events import Event

    Arrays = Sequence[Any]

Call = Callable[[], object]
MATMUL_RATIO_LIMIT = 0.8
TUNING_SECS_LIMIT = 20.0
SAMPLE_SECS = 1e-2
"""Approximate seconds of a sample, which has as many calls as fit."""
WARM_SECS = 0.05
"""Seconds of calls before a sample that are not counted."""
ERROR_LIMIT = 1e-4
HEAD = """\
edition = 1

[artifact]
name = "host"
version = "0.1.0"

[target.host]
arch = "host"

[defaults]
targets = ["host"]
policy = "auto"
"""


# NumPy's baselines: each takes attributes, inputs and the output, and returns a call without arguments


def _matmul(attrs: Mapping[str, Any], inputs: Arrays, out: Any) -> Call:
    import numpy as np

    a, b = inputs
    return functools.partial(np.matmul, a, b.T if attrs["layout"] == "nt" else b, out=out)


def _gemv(attrs: Mapping[str, Any], inputs: Arrays, out: Any) -> Call:
    import numpy as np

    del attrs
    return functools.partial(np.matmul, *inputs, out=out)


def _elementwise(attrs: Mapping[str, Any], inputs: Arrays, out: Any) -> Call:
    import numpy as np

    if attrs["op"] == "relu":
        return functools.partial(np.maximum, inputs[0], inputs[0].dtype.type(0), out=out)
    return functools.partial(np.add, *inputs, out=out)


def _reduce(attrs: Mapping[str, Any], inputs: Arrays, out: Any) -> Call:
    import numpy as np

    reduction = {"sum": np.add.reduce, "max": np.maximum.reduce}[attrs["op"]]
    return functools.partial(reduction, inputs[0], axis=tuple(attrs["axes"]), out=out)


def _softmax(attrs: Mapping[str, Any], inputs: Arrays, out: Any) -> Call:
    import numpy as np

    del attrs
    (x,) = inputs
    row = np.empty((*x.shape[:-1], 1), x.dtype)

    def softmax() -> None:
        np.maximum.reduce(x, axis=-1, keepdims=True, out=row)
        np.subtract(x, row, out=out)
        np.exp(out, out=out)
        np.add.reduce(out, axis=-1, keepdims=True, out=row)
        np.divide(out, row, out=out)

    return softmax


def _conv2d(attrs: Mapping[str, Any], inputs: Arrays, out: Any) -> Call:
    import numpy as np

    x, weight = inputs
    stride, padding = attrs["stride"], attrs["padding"]
    n, h, w, c = x.shape
    kh, kw, _, f = weight.shape
    padded = np.zeros((n, h + 2 * padding, w + 2 * padding, c), x.dtype)
    inner = padded[:, padding : padding + h, padding : padding + w]
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kh, kw), axis=(1, 2))[:, ::stride, ::stride]
    patches = windows.transpose(0, 1, 2, 4, 5, 3)  # n, rows, columns, kh, kw, c
    columns = np.empty(patches.shape, x.dtype)
    flat, kernel, result = columns.reshape(-1, kh * kw * c), weight.reshape(-1, f), out.reshape(-1, f)

    def conv2d() -> None:
        inner[...] = x
        np.copyto(columns, patches)
        np.matmul(flat, kernel, out=result)

    return conv2d


BASELINES = {
    "matmul": _matmul, "gemv": _gemv, "elementwise": _elementwise, "reduce": _reduce, "softmax": _softmax, "conv2d": _conv2d,
}  # fmt: skip
_CONV2D = {"rule": "conv2d", "n": 1}
WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    **{f"matmul_{t}_{m}": {"rule": "matmul", "m": m, "n": m, "k": m, "layout": t} for m in (512, 1024) for t in ("nn", "nt")},
    "conv2d_7x7": {**_CONV2D, "h": 112, "w": 112, "c": 3, "f": 64, "kh": 7, "kw": 7, "stride": 2, "padding": 3},
    "conv2d_3x3": {**_CONV2D, "h": 56, "w": 56, "c": 64, "f": 64, "kh": 3, "kw": 3, "padding": 1},
    "conv2d_1x1": {**_CONV2D, "h": 56, "w": 56, "c": 64, "f": 256, "kh": 1, "kw": 1},
    "gemv_1024": {"rule": "gemv", "n": 1024, "k": 1024},
    "gemv_4096": {"rule": "gemv", "n": 4096, "k": 4096},
    "softmax_1024": {"rule": "softmax", "shape": [1024, 1024]},
    "softmax_128x10": {"rule": "softmax", "shape": [128, 10]},
    "reduce_sum": {"rule": "reduce", "op": "sum", "shape": [16384, 1024], "axes": [-1]},
    "reduce_max": {"rule": "reduce", "op": "max", "shape": [16384, 1024], "axes": [-1]},
    "add": {"rule": "elementwise", "op": "add", "shape": [4096, 4096]},
    "relu": {"rule": "elementwise", "op": "relu", "shape": [4096, 4096]},
}


# Building


def toml_of(names: Sequence[str], top_k: int) -> str:
    """Return the content of workloads.toml. JSON writes these values as TOML does."""
    blocks = ({"name": name, **WORKLOADS[name]} for name in names)
    tables = ("".join(f"{key} = {json.dumps(value)}\n" for key, value in block.items()) for block in blocks)
    return f"{HEAD}top_k = {top_k}\n" + "".join(f"\n[[workload]]\n{table}" for table in tables)


class Stopwatch:
    """Receives a build's events and times each entry's tuning, from the end of the entry before."""

    def __init__(self) -> None:
        self.secs: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, event: Event) -> None:
        from kerneldecl.tuning.events import Finished

        if isinstance(event, Finished):
            now = time.perf_counter()
            if event.kind == "tune":
                self.secs[event.entry.rpartition("@")[0]] = now - self._last
                print(f"tuned {event.entry} in {now - self._last:.1f} s: {event.text}", file=sys.stderr)
            self._last = now


def built(root: Path, names: Sequence[str], top_k: int) -> tuple[Artifact, dict[str, float]]:
    """Return the artifact, and the seconds of tuning for entries that had to be tuned."""
    import kerneldecl

    root.mkdir(parents=True, exist_ok=True)
    (root / "workloads.toml").write_text(toml_of(names, top_k), encoding="utf-8")
    stopwatch = Stopwatch()
    artifact = kerneldecl.build(root, report=stopwatch)["host"]
    return artifact, stopwatch.secs


# Timing


@dataclass(frozen=True)
class Comparison:
    """An entry's kernel, and NumPy's call that computes the same."""

    kernel: Call
    numpy: Call

    def pairs(self, rounds: int) -> list[tuple[float, float]]:
        """Return seconds a call of kernel and NumPy, alternating; every other round NumPy runs first."""
        calls = {call: max(1, math.ceil(SAMPLE_SECS / _secs(call, 1))) for call in (self.kernel, self.numpy) for _ in range(2)}
        samples: list[tuple[float, float]] = []
        for index in range(rounds):
            order = (self.kernel, self.numpy) if index % 2 else (self.numpy, self.kernel)
            secs = {call: _sample(call, calls[call]) for call in order}
            samples.append((secs[self.kernel], secs[self.numpy]))
        return samples


def _sample(call: Call, calls: int) -> float:
    settle()
    warm_up(call)
    return _secs(call, calls)


def settle() -> None:
    """Wait until all threads sleep.

    After a call TVM's threads spin for 0.2 s and OpenBLAS's for 0.05 s (measured on an AMD EPYC), on cores that the other needs.
    """
    busy_secs = math.inf
    while busy_secs > 1e-3:
        before = time.process_time()
        time.sleep(0.02)
        busy_secs = time.process_time() - before


def warm_up(call: Call) -> None:
    """Call until caches are filled and threads are where they stay.

    After a sleep the system wakes a worker on the core where it ran last, also where the calling thread runs there by now, and parts them
    10 ms later: until then they take turns, and a call takes twice as long. Rivals in turns meet that in most samples.
    """
    end = time.perf_counter() + WARM_SECS
    while time.perf_counter() < end:
        call()


def _secs(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def comparison(artifact: Artifact, entry: Mapping[str, Any], root: Path) -> Comparison:
    """Return the entry's kernel and NumPy's call on the same random inputs; exit if their results differ."""
    import numpy as np

    from kerneldecl.arrays import aligned, poisoned, relative_error
    from kerneldecl.model import frozen
    from kerneldecl.plugins.load import load_rule

    rule = load_rule(root, entry["rule"])(**{name: frozen(value) for name, value in entry["attrs"].items()})
    inputs = [aligned(array) for array in rule.inputs(np.random.default_rng(0))]
    (arg,) = rule.signature().outputs
    ours, theirs = aligned(poisoned(arg)), aligned(poisoned(arg))
    both = Comparison(functools.partial(artifact[entry["name"]], *inputs, ours), BASELINES[entry["rule"]](entry["attrs"], inputs, theirs))
    both.kernel()
    both.numpy()
    error = relative_error(ours, theirs)
    if not error <= ERROR_LIMIT:
        sys.exit(f"{entry['name']}: kernel and NumPy differ by a relative error of {error:.2g}")
    return both


def measured(artifact: Artifact, entry: Mapping[str, Any], root: Path, rounds: int) -> dict[str, Any]:
    """Return the entry's row of the table."""
    samples = comparison(artifact, entry, root).pairs(rounds)
    kernel_secs, numpy_secs = (quantiles(column)[1] for column in zip(*samples, strict=True))
    low, ratio, high = quantiles([theirs / ours for ours, theirs in samples])
    best_kernel, best_numpy = (min(column) for column in zip(*samples, strict=True))
    return {
        "entry": entry["name"],
        "kernel us": kernel_secs * 1e6,
        "NumPy us": numpy_secs * 1e6,
        "NumPy/kernel": round(ratio, 3),
        "10 %": round(low, 3),
        "90 %": round(high, 3),
        "of bests": round(best_numpy / best_kernel, 3),
        "GFLOP/s": entry["flops"] / kernel_secs / 1e9,
        "NumPy's": entry["flops"] / numpy_secs / 1e9,
        "GB/s": entry["least_bytes"] / kernel_secs / 1e9,
    }


def _judged(row: dict[str, Any], rule: str, tuning_secs: float | None) -> dict[str, Any]:
    if tuning_secs is not None:
        row["tuning s"] = round(tuning_secs, 1)
    if rule == "matmul":
        is_within = row["NumPy/kernel"] >= MATMUL_RATIO_LIMIT and (tuning_secs or 0) < TUNING_SECS_LIMIT
        row["within"] = "yes" if is_within else "NO"
    return row


def blas() -> str:
    """Return the name and version of NumPy's BLAS."""
    import numpy as np

    found: Any = np.show_config(mode="dicts")
    library = found["Build Dependencies"]["blas"]
    return f"NumPy {np.__version__} with {library['name']} {library['version']}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time tuned kernels beside NumPy on this CPU.")
    parser.add_argument("patterns", nargs="*", default=["*"], help=f"which of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--top-k", type=int, default=20, help="candidates that are built and timed for each entry")
    parser.add_argument("--rounds", type=int, default=21, help="pairs of samples of each entry")
    parser.add_argument("--folder", type=Path, help="folder of the workspace, which a later run reuses; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    asked = parser.parse_args()
    names = [name for name in WORKLOADS if any(fnmatch.fnmatch(name, pattern) for pattern in asked.patterns)]
    described = machine()
    threads = str(described["cores"])
    os.environ.update(OPENBLAS_NUM_THREADS=threads, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, TVM_NUM_THREADS=threads)
    show_machine(described)
    print(f"{blas()}; {threads} threads each; float32; top_k {asked.top_k}", flush=True)
    with nullcontext(asked.folder) if asked.folder else tempfile.TemporaryDirectory(prefix="host-") as folder:
        root = Path(folder).resolve()
        artifact, tuning_secs = built(root, names, asked.top_k)
        entries = {entry["name"]: entry for entry in artifact.manifest["entries"]}
        rows = [
            _judged(measured(artifact, entries[name], root, asked.rounds), entries[name]["rule"], tuning_secs.get(name)) for name in names
        ]
    show("Kernel beside NumPy (a ratio over 1: the kernel is faster)", rows)
    print(f"\nWithin: matmul at least {MATMUL_RATIO_LIMIT} of NumPy's speed, tuned in less than {TUNING_SECS_LIMIT:.0f} s each.")
    write_json(asked.json, described, {"blas": blas(), "top_k": asked.top_k, "entries": rows})


if __name__ == "__main__":
    main()
