"""Owns the measurement of policies: the processor time of a proposal, for all entries that the repository declares.

Knows nothing of how good the proposals are, and needs no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.compiler.canonical import lower
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.declare.document import declare
from kerneldecl.model import Arch, IterSpace
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import standard_order

ROOT = Path(__file__).parents[1]
WORKSPACES = (ROOT, ROOT / "benchmarks" / "hopper")
TOP_K = 20
LIMIT_MS = 50.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200", help="target of the entries and of the arch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    described = machine()
    show_machine(described)
    arch, spaces = load_arch(ROOT, options.target), dict(_spaces(options.target))
    rows = [row for name in standard_order(arch.kind) if (row := _row(name, arch, spaces, options.rounds))]
    show(f"Processor time of a policy for {TOP_K} candidates; the goal is at most {LIMIT_MS:g} ms", rows)
    write_json(options.json, described, {"policies": rows})


def _spaces(target: str) -> Iterator[tuple[str, IterSpace]]:
    """Yield name and iteration space of each entry for a target."""
    for workspace in WORKSPACES:
        for workload in declare(workspace).workloads:
            if workload.target == target:
                yield workload.name, iter_space(lower(load_rule(ROOT, workload.rule).of(ROOT, dict(workload.attrs))))


def _row(name: str, arch: Arch, spaces: dict[str, IterSpace], rounds: int) -> dict[str, Any]:
    """Return a policy's row over the entries for which it proposes candidates; empty if there are none."""
    propose = load_module("policies", ROOT, name).propose
    ms_of = {entry: _ms(propose, space, arch, rounds) for entry, space in spaces.items() if propose(space, arch, TOP_K)}
    if not ms_of:
        return {}
    worst = max(ms_of, key=lambda entry: ms_of[entry])
    return {
        "policy": name,
        "entries": len(ms_of),
        "CPU ms": statistics.median(ms_of.values()),
        "most": ms_of[worst],
        "over": sum(ms > LIMIT_MS for ms in ms_of.values()),
        "for": worst,
    }


def _ms(propose: Any, space: IterSpace, arch: Arch, rounds: int) -> float:
    """Return the least processor time of a call: work on the core's other thread only adds to it."""
    return 1e3 * min(_once(propose, space, arch) for _ in range(rounds))


def _once(propose: Any, space: IterSpace, arch: Arch) -> float:
    began = time.process_time()
    propose(space, arch, TOP_K)
    return time.process_time() - began


if __name__ == "__main__":
    main()
