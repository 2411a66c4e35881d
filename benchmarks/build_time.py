"""Owns the question where the processor time of a candidate goes while it is built: schedule, lowering, nvcc, host code, library.

Knows nothing of GPUs: nothing is run. Each candidate is built in this process, as a compile worker builds it, in a new store.

    python benchmarks/build_time.py [--seed 37] [--count 20] [--each 3] [--arch h200]
"""

from __future__ import annotations

import argparse
import functools
import random
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bench_support.random_entries import DRAWN, drawn
from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.compiler import actions, canonical, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import standard_order
from kerneldecl.serial import to_json
from kerneldecl.toolchain import nvcc

ROOT = Path(__file__).parents[1]
TOOLCHAIN = {"tvm": "any", "tvm_ffi": "any", "cuda": "any"}
"""Versions are in the keys of records, and these are in a store of their own."""
PARTS = (
    (actions, "_scheduled", "template"),
    (cuda, "_generated", "TVM's passes and ours"),
    (cuda, "tir_to_runtime", "code: LLVM's IR, CUDA's text"),
    (nvcc, "shortened", "declarations for nvcc"),
    (nvcc, "compile_cubin", "nvcc"),
    (cuda, "_host_object", "host object"),
    (actions, "_link", "library"),
    (actions, "build", "all else"),
)
"""Functions that a part of the time is spent in, but for what others of them take within."""


class Spent(NamedTuple):
    """Seconds of processor time, of this process and of those that it has started."""

    own: float
    children: float


def now() -> Spent:
    """Return what has been spent so far."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Spent(own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime)


class Account:
    """What each part has spent itself, while functions are replaced by those that note it."""

    def __init__(self) -> None:
        self.parts = {label: [0.0, 0.0] for _, _, label in PARTS}
        self._open: list[str] = []

    def noting(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        """Return the function, which charges what it spends to its part and not to the one that it is called in."""

        @functools.wraps(function)
        def noted(*args: Any, **named: Any) -> Any:
            before = now()
            self._open.append(label)
            try:
                return function(*args, **named)
            finally:
                spent = [after - start for after, start in zip(now(), before, strict=True)]
                self._open.pop()
                self._charge(label, spent, 1)
                if self._open:
                    self._charge(self._open[-1], spent, -1)

        return noted

    def _charge(self, label: str, spent: list[float], sign: int) -> None:
        self.parts[label] = [held + sign * each for held, each in zip(self.parts[label], spent, strict=True)]


def requests(seed: int, count: int, each: int, arch: Arch, top_k: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield requests to build some candidates of each operator, of those that its policy proposes."""
    dice = random.Random(seed)
    for _, rule, attrs in drawn(seed, count, DRAWN, "cuda"):
        mod = canonical.lower(load_rule(ROOT, rule).of(ROOT, attrs))
        lists = (load_module("policies", STANDARD, name).propose(iter_space(mod), arch, top_k) for name in standard_order(arch.kind))
        found = next(filter(None, lists))
        spec = {
            "root": str(ROOT),
            "cache": str(folder / "cache"),
            "rule": rule,
            "attrs": attrs,
            "computation": canonical.module_digest(mod),
        }
        for proposal in dice.sample(found, min(each, len(found))):
            candidate = proposal.candidate.to_json()
            yield {"spec": spec, "candidate": candidate, "arch": to_json(arch), "toolchain": TOOLCHAIN, "folder": str(folder)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Build candidates of random operators, and say what takes processor time.")
    parser.add_argument("--seed", type=int, default=37)
    parser.add_argument("--count", type=int, default=20, help="operators")
    parser.add_argument("--each", type=int, default=3, help="candidates of an operator")
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--arch", default="h200")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    about = machine()
    show_machine(about)
    with tempfile.TemporaryDirectory(prefix="build-time-") as folder:
        asked = list(requests(given.seed, given.count, given.each, load_arch(ROOT, given.arch), given.top_k, Path(folder)))
        actions.build(**asked[0], force=True)  # what a process does once
        account = Account()
        with ExitStack() as stack:
            for module, name, label in PARTS:
                stack.enter_context(mock.patch.object(module, name, account.noting(getattr(module, name), label)))
            digests = [actions.build(**each, force=True).get("code_digest") for each in asked[1:]]
    count = len(digests)
    rows = [
        {"part": label, "own, ms": own / count * 1e3, "children, ms": children / count * 1e3}
        for label, (own, children) in account.parts.items()
    ]
    total = {"part": "all", **{name: sum(row[name] for row in rows) for name in ("own, ms", "children, ms")}}
    show(f"milliseconds of processor time a candidate, of {count}", [*rows, total])
    write_json(given.json, about, {"rows": [*rows, total], "digests": digests})


if __name__ == "__main__":
    main()
