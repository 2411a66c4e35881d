"""The last rows of an operand on wgmma have a TMA box of their own, so that no row beyond them is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from support.repository import REPOSITORY
from support.wgmma_cases import FLOAT16, PLAIN
from tvm.sym import Analyzer

from kerneldecl.compiler import canonical
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.templates.hopper.operands import operand_of
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_gemm import Matrix, read_gemm
from kerneldecl.templates.hopper.tails import Tail, with_tail
from kerneldecl.templates.wgmma_matmul import kernel_of


def simplified(value: Any) -> int:
    return int(Analyzer().simplify(value))


def tail_of(rows: int, tile_rows: int, ctas: int = 1, *, k_first: bool = False) -> Tail | None:
    """Return how the last rows of a float16 matrix of k = 128 are loaded."""
    dims = ((rows, 1), (128, rows)) if k_first else ((rows, 128), (128, 1))
    matrix = Matrix(None, "float16", *dims)
    operand = with_tail(operand_of(matrix, tile_rows, ctas), matrix, tile_rows)
    assert operand is not None
    return None if operand.tma is None else operand.tma.tail


@pytest.mark.parametrize(("rows", "tile_rows"), [(305, 168), (1, 8), (167, 168), (169, 168), (1321, 256)])
def test_all_rows_are_loaded_and_none_beyond(rows: int, tile_rows: int) -> None:
    tail = tail_of(rows, tile_rows)
    assert tail is not None
    last = simplified(tail.map.box[1])
    assert last == (rows - 1) % tile_rows + 1
    loaded = [simplified(tail.loaded_bytes(first)) for first in range(0, 2 * (rows + tile_rows), tile_rows)]
    assert sum(loaded) == rows * 128
    assert set(loaded) <= {tile_rows * 128, last * 128, 0}


@pytest.mark.parametrize(("rows", "ctas"), [(305, 2), (1, 2), (257, 4), (63, 4)])
def test_ctas_that_share_a_tile_cut_its_last_rows_in_whole_groups(rows: int, ctas: int) -> None:
    tail = tail_of(rows, 64, ctas)
    assert tail is not None
    box = simplified(tail.map.box[1])
    assert box % 8 == 0
    assert 0 <= box * ctas - ((rows - 1) % 64 + 1) < 8 * ctas
    first = (rows - 1) // 64 * 64
    assert [simplified(tail.loaded_bytes(at)) for at in (first, first + 64)] == [box * ctas * 128, 0]
    assert simplified(tail.box_rows(first)) == box


def test_whole_tiles_uneven_shares_and_rows_that_are_contiguous_have_none() -> None:
    assert tail_of(336, 168) is None
    assert tail_of(305, 168, ctas=2) is None  # three boxes, two of them one CTA's
    assert tail_of(20, 8, ctas=4) is None  # one box, which one CTA loads for all
    assert tail_of(304, 168, k_first=True) is None


@pytest.mark.parametrize(
    ("params", "tails"),
    [
        ({}, (True, True)),
        ({"cluster_n": 2}, (True, True)),
        ({"cluster_m": 2}, (True, True)),
        ({"cluster_m": 2, "block_n": 24}, (True, False)),
    ],
    ids=str,
)
def test_what_a_cluster_shares_unevenly_is_loaded_in_whole_boxes(params: dict[str, Value], tails: tuple[bool, bool]) -> None:
    gemm = read_gemm(canonical.lower(load_rule(REPOSITORY, "matmul").of(REPOSITORY, FLOAT16)))
    assert gemm is not None
    kernel = kernel_of(gemm, GemmParams.of({**PLAIN, **params}), False, load_arch(REPOSITORY, "h200"))
    assert kernel is not None
    assert (kernel.a.has_tail, kernel.b.has_tail) == tails
