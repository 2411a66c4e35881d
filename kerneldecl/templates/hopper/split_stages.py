"""Owns the division of a function into its first stages, which prepare a GEMM's operands, and the rest of it.

Knows nothing of what stages compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule

from kerneldecl.templates.hopper.read_gemm import GemmProblem


def split_stages(func: Any, count: int) -> tuple[list[Any], Any] | None:
    """Return each of the first stages as a function of its own, and the function of the others; None where stages are no such functions.

    The parameters of a stage's function are those of the whole function that it reads, in their order, and its result. The results are the
    last parameters of the other function.
    """
    sch = Schedule(tvm.IRModule({"main": func}))
    root = sch.get(sch.get_sblock("root"))
    blocks = [sch.get(block) for block in sch.get_child_blocks(sch.get_sblock("root"))]
    if len(blocks) <= count or not isinstance(root.body, tirx.SeqStmt) or len(root.body.seq) != len(blocks):
        return None
    loops, stages, results = list(root.body.seq), [], []
    for block, loop in zip(blocks[:count], loops, strict=False):
        read = [region.source for region in block.reads]
        found = [buffer for buffer in func.params if any(buffer.same_as(each) for each in read)]
        result = block.writes[0].source
        if len(found) != len(read) or not any(result.same_as(each) for each in root.alloc_buffers):
            return None
        stages.append(tirx.PrimFunc([*found, result], _rooted(loop, [])))
        results.append(result)
    others = [buffer for buffer in root.alloc_buffers if not any(buffer.same_as(each) for each in results)]
    rest = loops[count:]
    body = rest[0] if len(rest) == 1 else tirx.SeqStmt(rest)
    return stages, tirx.PrimFunc([*func.params, *results], _rooted(body, others))


def fresh_of(gemm: GemmProblem, func: Any, buffers: Sequence[Any]) -> list[Any]:
    """Return the buffers of a GEMM that stand for some of its function's parameters: `read_gemm` gives each one its own, in order."""
    return [gemm.func_params[next(i for i, param in enumerate(func.params) if param.same_as(buffer))] for buffer in buffers]


def _rooted(body: Any, buffers: list[Any]) -> Any:
    return SBlockRealize([], True, SBlock([], [], [], "root", body, alloc_buffers=buffers))
