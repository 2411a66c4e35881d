"""Exp, erf and tanh are right to a few units in the last place, over their range and at its ends, and are vector code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te

from kerneldecl.artifact.kernels import kernel_of, load_library
from kerneldecl.compiler import cpu
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.hardware.host import detect
from kerneldecl.toolchain.cxx import link_shared_library

LANES = 16
CASES = {"exp": (math.exp, 3e-7), "erf": (math.erf, 1e-6), "tanh": (math.tanh, 5e-7)}


def scheduled(name: str, count: int, dtype: str = "float32") -> Any:
    x = te.placeholder((count,), dtype, name="x")
    y = te.compute((count,), lambda i: getattr(tvm.tirx, name)(x[i]), name="y")
    sch = tvm.s_tir.Schedule(canonical_module(te.create_prim_func([x, y], index_dtype_override="int64")))
    (loop,) = sch.get_loops(sch.get_sblock("y"))
    sch.vectorize(sch.split(loop, [None, LANES])[1])
    return sch.mod


def run(name: str, x: np.ndarray[Any, Any], folder: Path) -> np.ndarray[Any, Any]:
    path = folder / f"{name}.o"
    path.write_bytes(cpu.compile_object(scheduled(name, len(x), str(x.dtype)), detect(), f"kd_{name}"))
    link_shared_library(path.with_suffix(".so"), [path])
    y = np.full_like(x, 7.0)
    kernel_of(load_library(path.with_suffix(".so")), f"kd_{name}")(x, y)
    return y


@pytest.mark.parametrize("name", CASES)
def test_values_over_the_whole_range(name: str, tmp_path: Path) -> None:
    reference, tolerance = CASES[name]
    x = np.linspace(-87, 88, LANES * 1000, dtype=np.float32)
    x[: LANES * 500] /= 20  # half of them where the functions bend
    want = np.array([reference(float(value)) for value in x])
    assert np.max(np.abs(run(name, x, tmp_path) - want) / np.abs(want)) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_float16_is_rounded_once(name: str, tmp_path: Path) -> None:
    x = np.linspace(-9, 9, LANES * 1000).astype(np.float16)
    want = np.array([CASES[name][0](float(value)) for value in x])
    smallest = 2.0**-24
    units = np.maximum(np.spacing(np.abs(want).astype(np.float16)).astype(float), smallest)
    assert np.max(np.abs(run(name, x, tmp_path) - want) / units) < 0.51


@pytest.mark.parametrize(("name", "at_infinities"), [("exp", (np.inf, 0.0)), ("erf", (1.0, -1.0)), ("tanh", (1.0, -1.0))])
def test_infinities_and_nan(name: str, at_infinities: tuple[float, float], tmp_path: Path) -> None:
    x = np.full(LANES, np.nan, np.float32)
    x[1], x[2], x[3], x[4] = np.inf, -np.inf, 1e30, -1e30
    got = run(name, x, tmp_path)
    assert tuple(got[1:5]) == at_infinities * 2
    assert np.isnan(got[[0, 5, 6, 7, 8]]).all()


@pytest.mark.parametrize("name", CASES)
def test_no_call_to_the_c_library_is_left(name: str) -> None:
    func = scheduled(name, LANES * 8)["main"].with_attr("global_symbol", "f")
    library = tvm.tirx.build(tvm.IRModule({"f": func}), target=cpu.target_of(detect()), pipeline=cpu.PIPELINE)
    calls = [line for line in library.inspect_source("asm").splitlines() if "call" in line]
    assert not any(f"{name}f" in line for line in calls)
