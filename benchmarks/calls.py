"""Owns the time of a call from Python: what a program pays beside the kernel itself.

Knows nothing of what kernels compute: it times one of 8 x 32 elements, which the host queues or computes in well under a microsecond.
Needs torch; with a GPU of an arch in archs/, `--target h200` times calls that queue a kernel there:

    python benchmarks/calls.py
    python benchmarks/calls.py --target h200
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import kerneldecl

CALLS, ROUNDS = 2_000, 15
_TOML = """
edition = 1
[artifact]
name = "calls"
version = "1"
[target.here]
arch = "{arch}"
[[workload]]
name = "add"
rule = "elementwise"
op = "add"
shape = [[8, 32], [16, 32]]
top_k = 2
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="host", help="an arch's name")
    arch = parser.parse_args().target
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "workloads.toml").write_text(_TOML.format(arch=arch), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "kerneldecl", "-q", "build"], cwd=root, check=True)
        began = time.perf_counter()
        kernels = kerneldecl.load(next(root.glob("dist/*/here")))
        loaded = time.perf_counter()
        device = "cpu" if arch == "host" else "cuda"
        a, b, out = (torch.zeros(8, 32, device=device) for _ in range(3))
        _wait(device)
        name = next(name for name in kernels if "8,32" in name or "[8, 32]" in name or name.endswith("8x32]"))
        first = time.perf_counter()
        kernels[name](a, b, out)
        _wait(device)
        print(f"load {1e3 * (loaded - began):.2f} ms, first call {1e3 * (time.perf_counter() - first):.2f} ms")
        symbol = next(entry["symbol"] for entry in kernels.manifest["entries"] if entry["name"] == name)
        raw, dispatch, ops = kernels.library.get_function(symbol), kernels.dispatch("add"), kernels.torch_ops("kerneldecl_calls")
        kernel = kernels[name]
        forms: list[tuple[str, Callable[[], Any]]] = [
            ("TVM's FFI alone", lambda: raw(a, b, out)),
            ("kernel(a, b, out)", lambda: kernel(a, b, out)),
            ("kernel(a, b), a new output", lambda: kernel(a, b)),
            ("dispatch(a, b, out)", lambda: dispatch(a, b, out)),
            ("torch.ops", lambda: ops.add(a, b)),
            ("torch.add(a, b, out=out)", lambda: torch.add(a, b, out=out)),
        ]
        times: dict[str, list[float]] = {name: [] for name, _ in forms}
        for _ in range(ROUNDS):
            for form, call in forms:
                times[form].append(_call_secs(call, device))
        for form, found in times.items():
            print(f"{form:<28} {1e6 * median(found):6.2f} us a call")


def _call_secs(call: Callable[[], Any], device: str) -> float:
    """Return the host's seconds a call, the median of whose rounds counts; a GPU's queue is empty before and drained outside."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - began
    _wait(device)
    return spent / CALLS


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
