"""Iteration spaces: what is read out of a TensorIR function, and which functions have none."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import te, tirx
from tvm.script import tirx as T  # noqa: N812  TVMScript's own name

from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Access, Axis, Block, Condition, IterSpace


def space_of(*tensors: Any) -> IterSpace:
    return iter_space(tvm.IRModule({"main": te.create_prim_func(list(tensors), index_dtype_override="int64")}))


def module(func: Any) -> tvm.IRModule:
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main")})


def test_convolution_with_padding_and_epilogue() -> None:
    x = te.placeholder((2, 8, 9, 3), "float32", "X")
    w = te.placeholder((3, 3, 3, 4), "float16", "W")
    b = te.placeholder((4,), "float32", "b")

    def pad(n: Any, h: Any, i: Any, c: Any) -> Any:
        inside = tirx.all(h >= 1, h < 9, i >= 1, i < 10)
        return tirx.if_then_else(inside, x[n, h - 1, i - 1, c], tirx.const(0, "float32"))

    padded = te.compute((2, 10, 11, 3), pad, "padded")
    r, s, c = (te.reduce_axis((0, extent), name) for extent, name in ((3, "r"), (3, "s"), (3, "c")))
    conv = te.compute(
        (2, 4, 5, 4),
        lambda n, h, i, f: te.sum(padded[n, h * 2 + r, i * 2 + s, c] * w[r, s, c, f].astype("float32"), axis=[r, s, c]),
        "conv",
    )
    out = te.compute((2, 4, 5, 4), lambda n, h, i, f: tirx.max(conv[n, h, i, f] + b[f], tirx.const(0, "float32")), "Y")
    space = space_of(x, w, b, out)

    assert [block.name for block in space.blocks] == ["padded", "conv", "Y"]
    assert (space.inputs, space.outputs) == (("X", "W", "b"), ("Y",))
    first, second, third = space.blocks
    plain = tuple(((axis, 1),) for axis in range(4))
    assert first.reads == (Access("X", (2, 8, 9, 3), "float32", plain),)
    assert (first.flops_per_point, first.is_reduction) == (0, False)
    assert second.axes[3:] == (Axis("f", 4, "spatial"), Axis("r", 3, "reduce"), Axis("s", 3, "reduce"), Axis("c", 3, "reduce"))
    assert second.reads == (
        Access("padded", (2, 10, 11, 3), "float32", (((0, 1),), ((1, 2), (4, 1)), ((2, 2), (5, 1)), ((6, 1),))),
        Access("W", (3, 3, 3, 4), "float16", (((4, 1),), ((5, 1),), ((6, 1),), ((3, 1),))),
    )
    assert second.writes == (Access("conv", (2, 4, 5, 4), "float32", plain),)
    assert (second.flops_per_point, second.is_reduction) == (2, True)
    assert (third.flops_per_point, third.reads[1]) == (2, Access("b", (4,), "float32", (((3, 1),),)))


def test_flops_count_what_depends_on_data() -> None:
    x = te.placeholder((4, 4), "uint8", "X")

    def element(i: Any, j: Any) -> Any:
        nibble = (x[i, j // 2] >> ((j % 2) * 4).astype("uint8")) & tirx.const(15, "uint8")
        return tirx.exp(nibble.astype("float32") - 8.0) * tirx.Select(j > 2, tirx.const(2.0, "float32"), tirx.const(1.0, "float32"))

    (block,) = space_of(x, te.compute((4, 8), element, "Y")).blocks
    assert block.flops_per_point == 3  # minus, exp, times; the arithmetic on j is not on data
    assert block.reads == (Access("X", (4, 4), "uint8", (((0, 1),), None)),)


def test_reduction_leaves_out_its_accumulator_and_equal_reads() -> None:
    x = te.placeholder((5, 1, 8), "float32", "X")
    k = te.reduce_axis((0, 8), "k")
    (block,) = space_of(x, te.compute((5, 1), lambda i, j: te.sum(x[i, j, k] * x[i, j, k], axis=k), "Y")).blocks
    assert block.reads == (Access("X", (5, 1, 8), "float32", (((0, 1),), (), ((2, 1),))),)
    assert block.flops_per_point == 2


def test_scalars_and_equal_names() -> None:
    x = te.placeholder((8,), "float32", "T")
    k = te.reduce_axis((0, 8), "k")
    total = te.compute((), lambda: te.max(x[k], axis=k), "T")
    space = space_of(x, te.compute((), lambda: total() + 1.0, "T"))
    assert (space.inputs, space.outputs) == (("T",), ("T_1",))
    assert [access.operand for block in space.blocks for access in (*block.reads, *block.writes)] == ["T", "T_2", "T_2", "T_1"]
    assert space.blocks[0] == Block(
        "T",
        (Axis("k", 8, "reduce"),),
        (Access("T", (8,), "float32", (((0, 1),),)),),
        (Access("T_2", (), "float32", ()),),
        1,
        is_multiply_accumulate=False,
    )


def test_conditions_outside_of_which_a_value_is_constant() -> None:
    x, zero = te.placeholder((4, 6), "float32", "X"), tirx.const(0.0, "float32")

    def conditions(condition: Any, otherwise: Any) -> tuple[Condition, ...]:
        out = te.compute((4, 6), lambda i, j: tirx.if_then_else(condition(i, j), x[i, j], otherwise(i, j)), "Y")
        return space_of(x, out).blocks[0].conditions

    def constant(_i: Any, _j: Any) -> Any:
        return zero

    assert conditions(lambda i, j: tirx.all(j <= i + 2, j > i - 3), constant) == (
        (((0, 1), (1, -1)), 2),
        (((0, -1), (1, 1)), 2),
    )
    assert conditions(lambda i, j: tirx.all(i >= 1, i * j < 9, x[j % 4, i] > 0), constant) == ((((0, 1),), -1),)
    assert conditions(lambda i, _: i < 3, lambda i, j: x[i, j] + 1.0) == ()


def test_gather_is_not_affine_and_its_index_is_read() -> None:
    x, rows = te.placeholder((9, 4), "float32", "X"), te.placeholder((3,), "int64", "rows")
    (block,) = space_of(x, rows, te.compute((3, 4), lambda i, j: x[rows[i], j], "Y")).blocks
    assert block.reads == (
        Access("X", (9, 4), "float32", (None, ((1, 1),))),
        Access("rows", (3,), "int64", (((0, 1),),)),
    )


def test_axes_in_the_order_of_the_block_and_statements_in_it() -> None:
    @T.prim_func(s_tir=True)
    def func(a: T.Buffer((4, 6), "float32"), b: T.Buffer((6, 4), "float32")) -> None:
        for p, q in T.grid(4, 6):
            with T.sblock("inner_loop"):
                j, i = T.axis.remap("SS", [q, p])
                if a[i, j] > 0:
                    b[j, i] = 0.0
                for _ in range(3):
                    b[j, i] = b[j, i] + a[i, j]

    (block,) = iter_space(module(func)).blocks
    assert block.axes == (Axis("q", 6, "spatial"), Axis("p", 4, "spatial"))
    assert block.reads[0].index == (((1, 1),), ((0, 1),))
    assert "b" in {access.operand for access in block.reads}
    assert block.flops_per_point == 3


@T.prim_func(s_tir=True)
def opaque(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")) -> None:
    for i in range(4):
        with T.sblock("copy"):
            T.reads(a[i])
            T.writes(b[i])
            b[i] = a[i]


@T.prim_func(s_tir=True)
def external(a: T.Buffer((4,), "float32")) -> None:
    for i in range(4):
        with T.sblock("call"):
            v = T.axis.spatial(4, i)
            T.reads()
            T.writes(a[v])
            T.evaluate(T.call_extern("int32", "touch", a.data, v))


def scheduled() -> tvm.IRModule:
    x = te.placeholder((16, 16), "float32", "X")
    mod = tvm.IRModule({"main": te.create_prim_func([x, te.compute((16, 16), lambda i, j: x[i, j] + 1.0, "Y")])})
    sch = tvm.s_tir.Schedule(mod)
    i, j = sch.get_loops(sch.get_sblock("Y"))
    _, inner = sch.split(i, [None, 4])
    sch.reorder(inner, j)
    sch.blockize(inner)
    return sch.mod


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (lambda: module(opaque), "block copy is opaque"),
        (lambda: module(external), "block call is opaque: it has Evaluate"),
        (scheduled, "holds other blocks"),
    ],
    ids=["loop variables", "external call", "nested"],
)
def test_functions_without_a_space_are_named_in_one_sentence(mod: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        iter_space(mod())
    assert "\n" not in str(raised.value)
