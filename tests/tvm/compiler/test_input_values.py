"""Inputs of functions that index, divide and shift with them stay inside of what is there."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import tirx as T  # noqa: N812

from kerneldecl.arrays import integers_between
from kerneldecl.compiler.input_values import Allowed, allowed_values
from kerneldecl.signature import Arg


@T.prim_func(s_tir=True)
def table_of_three(
    table: T.Buffer((30, 4), "float32"), column: T.Buffer((8,), "int32"), which: T.Buffer((8,), "int64"), out: T.Buffer((8,), "float32")
) -> None:
    """Three tables of ten rows, one after the other; the second input says which, by an intermediate result."""
    start = T.sblock_alloc_buffer((8,), "int64")
    for i in range(8):
        with T.sblock("start"):
            v = T.axis.spatial(8, i)
            start[v] = which[v] * T.int64(10) + T.int64(9)
    for i in range(8):
        with T.sblock("out"):
            v = T.axis.spatial(8, i)
            out[v] = table[start[v], column[v]]


@T.prim_func(s_tir=True)
def guarded(table: T.Buffer((30,), "float32"), at: T.Buffer((8,), "int32"), out: T.Buffer((8,), "float32")) -> None:
    for i in range(8):
        with T.sblock("out"):
            v = T.axis.spatial(8, i)
            out[v] = T.if_then_else(at[v] >= 0 and at[v] < 30, table[at[v]], T.float32(0.0))


@T.prim_func(s_tir=True)
def divided(x: T.Buffer((8,), "int16"), y: T.Buffer((8,), "int8"), n: T.Buffer((8,), "uint8"), out: T.Buffer((8,), "int16")) -> None:
    for i in range(8):
        with T.sblock("out"):
            v = T.axis.spatial(8, i)
            out[v] = T.truncmod(x[v], T.Cast("int16", y[v])) // (T.Cast("int16", n[v]) + T.int16(3))


@T.prim_func(s_tir=True)
def of_their_sum(
    table: T.Buffer((30,), "float32"), a: T.Buffer((8,), "int32"), b: T.Buffer((8,), "int32"), out: T.Buffer((8,), "float32")
) -> None:
    for i in range(8):
        with T.sblock("out"):
            v = T.axis.spatial(8, i)
            out[v] = table[a[v] + b[v]]


@T.prim_func(s_tir=True)
def of_a_float(table: T.Buffer((30,), "float32"), a: T.Buffer((8,), "float32"), out: T.Buffer((8,), "float32")) -> None:
    for i in range(8):
        with T.sblock("out"):
            v = T.axis.spatial(8, i)
            out[v] = table[T.Cast("int32", a[v])]


@T.prim_func(s_tir=True)
def scattered(a: T.Buffer((8,), "float32"), at: T.Buffer((8,), "int32"), out: T.Buffer((8,), "float32")) -> None:
    for i in range(8):
        with T.sblock("out"):
            v = T.axis.spatial(8, i)
            out[at[v]] = a[v]


def test_indices_are_inside_of_what_they_index() -> None:
    allowed = allowed_values(table_of_three)
    assert allowed[1] == Allowed(0, 3)
    assert 0 <= allowed[2].low <= allowed[2].high <= 2


def test_a_guarded_index_may_be_anything() -> None:
    assert allowed_values(guarded)[1] == Allowed(-128, 127)


def test_divisors_do_not_trap() -> None:
    allowed = allowed_values(divided)
    assert allowed[1].without >= {0, -1}
    assert allowed[2].low >= 0
    values = integers_between(np.random.default_rng(0), Arg("y", (4000,), "int8"), allowed[1].low, allowed[1].high, allowed[1].without)
    assert {0, -1}.isdisjoint(values.tolist())
    assert values.min() < -100


@pytest.mark.parametrize(("func", "sentence"), [(scattered, "say where it writes"), (of_a_float, "no values of its input a are known")])
def test_what_no_values_are_known_for_is_said(func: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        allowed_values(func)


def test_two_inputs_of_one_index_stay_inside_together() -> None:
    allowed = allowed_values(of_their_sum)
    assert sum(each.high for each in allowed.values()) < 30
    assert min(each.low for each in allowed.values()) >= 0


@T.prim_func(s_tir=True)
def shifted(x: T.Buffer((8,), "int8"), by: T.Buffer((8,), "int8"), out: T.Buffer((8,), "int8")) -> None:
    for i in range(8):
        with T.sblock("out"):
            v = T.axis.spatial(8, i)
            out[v] = T.shift_left(x[v], by[v])


def test_shifts_are_within_a_word() -> None:
    assert allowed_values(shifted) == {1: Allowed(0, 7)}


@T.prim_func(s_tir=True)
def raised(x: T.Buffer((8,), "float32"), n: T.Buffer((8,), "int32"), out: T.Buffer((8,), "float32")) -> None:
    for i in range(8):
        with T.sblock("out"):
            v = T.axis.spatial(8, i)
            out[v] = T.pow(x[v], T.Cast("float32", n[v]))


def test_whole_exponents_are_small() -> None:
    assert allowed_values(raised) == {1: Allowed(0, 3)}
