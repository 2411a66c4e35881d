"""Owns the measurement of what CUDA's headers cost nvcc: candidates of random operators, compiled with declarations and with the headers.

Knows nothing of GPUs: nothing is run. Both take turns, kernel by kernel, and must give the same cubin, byte for byte.

    python benchmarks/compile_time.py [--seed 1] [--count 40] [--each 3] [--arch h200]
"""

from __future__ import annotations

import argparse
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench_support.random_entries import DRAWN, drawn
from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.cuda import CudaProgram, cuda_program
from kerneldecl.compiler.cuda_headers import headers_for
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import standard_order
from kerneldecl.toolchain import nvcc
from kerneldecl.toolchain.nvcc import Cubin

ROOT = Path(__file__).parents[1]


class Kernel(NamedTuple):
    """A candidate's source."""

    template: str
    program: CudaProgram


def kernels(seed: int, count: int, each: int, arch: Arch, top_k: int) -> Iterator[Kernel]:
    """Yield some candidates of each operator, of those that its policy proposes."""
    dice = random.Random(seed)
    for _, rule, attrs in drawn(seed, count, DRAWN, "cuda"):
        mod = canonical.lower(load_rule(ROOT, rule).of(ROOT, attrs))
        space = iter_space(mod)
        lists = (load_module("policies", STANDARD, name).propose(space, arch, top_k) for name in standard_order(arch.kind))
        found = next(filter(None, lists))
        for proposal in dice.sample(found, min(each, len(found))):
            if scheduled := apply_candidate(STANDARD, mod, proposal.candidate, arch):
                yield Kernel(proposal.candidate.template, cuda_program(scheduled.mod, arch, "kernel"))


def timed(compile_it: Callable[[], Cubin]) -> tuple[Cubin, float]:
    """Return a cubin, and the seconds of processor time that it took this process and its children."""
    before = _cpu_secs()
    cubin = compile_it()
    return cubin, _cpu_secs() - before


def _cpu_secs() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile candidates of random operators with CUDA's headers and with declarations alone.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="operators")
    parser.add_argument("--each", type=int, default=3, help="candidates of an operator")
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--arch", default="h200")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    about = machine()
    show_machine(about)
    rows: list[dict[str, Any]] = []
    for kernel in kernels(given.seed, given.count, given.each, load_arch(ROOT, given.arch), given.top_k):
        source, arch, flags = kernel.program.source, kernel.program.arch, kernel.program.flags
        declared = headers_for(arch, flags)
        if declared is None:
            parser.error("another process reads the headers")
        short, short_secs = timed(lambda: nvcc.compile_cubin(source, arch, flags, declared))  # noqa: B023  called at once
        whole, whole_secs = timed(lambda: nvcc.compile_cubin(source, arch, flags))  # noqa: B023
        rows.append(
            {
                "template": kernel.template,
                "kernels": 1,
                "declarations, s": short_secs,
                "headers, s": whole_secs,
                "same cubin": int(short == whole),
                "no headers": int(nvcc.shortened(source, declared) is not None),
            }
        )
    summed = [_sum(name, [row for row in rows if row["template"] == name]) for name in dict.fromkeys(row["template"] for row in rows)]
    total = _sum("all", rows)
    show("seconds of processor time a kernel", [*summed, total])
    write_json(given.json, about, {"rows": [*summed, total]})
    if total["same cubin"] < total["kernels"]:
        raise SystemExit(1)


def _sum(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means of times, and counts."""
    times = {key: sum(row[key] for row in rows) / len(rows) for key in ("declarations, s", "headers, s")}
    return {"template": name, **times, **{key: sum(row[key] for row in rows) for key in ("kernels", "same cubin", "no headers")}}


if __name__ == "__main__":
    main()
