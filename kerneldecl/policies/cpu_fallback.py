"""Owns in which order the schedules that fit every function are tried on a CPU.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools

from kerneldecl.model import Arch, Block, Candidate, Cpu, IterSpace, Proposal
from kerneldecl.policies.cpu.time_model import Work, busiest_share, compute_lanes, predicted_secs
from kerneldecl.policies.shared.traffic import moved_bytes, points

TEMPLATES = ("cpu_fallback",)
AUTO = {"cpu": 90}


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return all combinations of cores and vectors, last the one that changes nothing."""
    choices = list(itertools.product((True, False), (True, False)))
    *others, unchanged = choices
    secs = {choice: _secs(space, arch.the_cpu, *choice) for choice in choices}
    return tuple(_proposal(choice, secs[choice]) for choice in (*sorted(others, key=secs.__getitem__), unchanged))[:top_k]


def _proposal(choice: tuple[bool, bool], secs: float) -> Proposal:
    is_parallel, is_vector = choice
    return Proposal(Candidate.of("cpu_fallback", {"parallel": is_parallel, "vectorize": is_vector}), secs)


def _secs(space: IterSpace, cpu: Cpu, is_parallel: bool, is_vector: bool) -> float:
    return sum(_block_secs(block, cpu, is_parallel, is_vector) for block in space.blocks) + moved_bytes(space) / cpu.dram_bytes_per_s


def _block_secs(block: Block, cpu: Cpu, is_parallel: bool, is_vector: bool) -> float:
    lanes = compute_lanes(cpu, block.writes[0].dtype) if is_vector else 1
    share = busiest_share(points(block, "spatial"), cpu.cores) if is_parallel else 1.0
    cycles = points(block) * (block.flops_per_point + len(block.reads) + len(block.writes)) / lanes
    return predicted_secs(cpu, Work(compute_cycles=cycles * share, parallel_regions=int(is_parallel)))
