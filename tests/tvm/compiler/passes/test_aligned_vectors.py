"""Vectors that lie in one run of a divided index keep together, and nothing else changes: neither values nor other loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from support.repository import REPOSITORY
from support.thinned import at
from tvm import te
from tvm.tirx import FloorDiv, FloorMod, For, ForKind, Var
from tvm_ffi import structural

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.passes.aligned_vectors import aligned_vectors
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.templates import gpu_matmul_tc

LANES = 8
ROWS, STRIDE = 15, 64
TILE: dict[str, Value] = {
    "block_m": 64,
    "block_n": 32,
    "block_k": 32,
    "warps_m": 2,
    "warps_n": 2,
    "raster_group": 1,
    "smem_epilogue": 0,
    "split_k": 1,
    "stages": 3,
}


def gathered(columns: int, begin: int) -> Any:
    """Rows of `columns` elements out of longer ones, every third row as zeros; copied in vectors of LANES."""
    x = te.placeholder((ROWS * STRIDE,), "float32", name="x")

    def element(i: Any) -> Any:
        row, column = tvm.tirx.floordiv(i + begin, columns), tvm.tirx.floormod(i + begin, columns)
        return tvm.tirx.if_then_else(tvm.tirx.floormod(row, 3) > 0, x[row * STRIDE + column], 0.0)

    y = te.compute(((ROWS - 1) * columns // LANES * LANES,), element, name="y")
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    (loop,) = sch.get_loops(sch.get_sblock("y"))
    sch.vectorize(sch.split(loop, [None, LANES])[1])
    sch.work_on("main")
    return tvm.ir.transform.Sequential([tvm.s_tir.transform.ConvertBlocksToOpaque(), tvm.s_tir.transform.LowerOpaqueBlock()])(sch.mod)


def divided_by_element(mod: tvm.IRModule) -> int:
    """Return how many quotients and remainders in vectorized loops depend on the loop's variable."""
    found: list[Any] = []

    def loop(node: Any) -> None:
        def division(each: Any) -> None:
            structural.structural_walk(each.a, [(Var, lambda var: found.append(each) if var.same_as(node.loop_var) else None)])

        if node.kind == ForKind.VECTORIZED:
            structural.structural_walk(node.body, [(FloorDiv, division), (FloorMod, division)])

    structural.structural_walk(mod["main"].body, [(For, loop)])
    return len(found)


def run(mod: tvm.IRModule) -> np.ndarray[Any, Any]:
    x = np.arange(ROWS * STRIDE, dtype=np.float32)
    y = np.full(int(mod["main"].params[1].ty.shape[0]), -1, np.float32)
    tensors = [tvm.runtime.tensor(each) for each in (x, y)]
    tvm.compile(mod, "llvm")["main"](*tensors)
    return tensors[1].numpy()


@pytest.mark.parametrize(("columns", "begin"), [(24, 0), (24, 16), (40, 8)])
def test_a_vector_within_a_row_has_one_quotient(columns: int, begin: int) -> None:
    before = gathered(columns, begin)
    after = aligned_vectors(before)
    assert divided_by_element(before) > 0
    assert divided_by_element(after) == 0
    place = np.arange((ROWS - 1) * columns // LANES * LANES) + begin
    row, column = place // columns, place % columns
    assert np.array_equal(run(after), np.where(row % 3 > 0, row * STRIDE + column, 0))


@pytest.mark.parametrize(("columns", "begin"), [(20, 0), (24, 4), (24, 1)])
def test_vectors_that_cross_rows_stay_as_they_are(columns: int, begin: int) -> None:
    before = gathered(columns, begin)
    tvm.ir.assert_structural_equal(aligned_vectors(before), before)


@pytest.mark.parametrize(("channels", "bytes_at_once"), at({2}, [(40, 16), (72, 16), (36, 8)]))
def test_channels_that_k_tiles_do_not_divide_are_copied_in_vectors(channels: int, bytes_at_once: int) -> None:
    rule = load_rule(REPOSITORY, "conv2d").of(
        REPOSITORY, {"dtype": "float16", "n": 2, "h": 9, "w": 9, "c": channels, "f": 32, "kh": 3, "kw": 3, "stride": 2, "padding": 1}
    )
    arch = load_arch(REPOSITORY, "a100-80gb")
    scheduled = gpu_matmul_tc.apply(canonical.lower(rule), TILE, arch)
    assert scheduled is not None
    source = cuda_source(scheduled.mod, arch, "kd_conv")
    assert f"ptx_cp_async_legacy_pred_{'cg' if bytes_at_once == 16 else 'ca'}_{bytes_at_once}" in source
    assert "condval" not in source  # a single element, or zero where it is padding
