"""The GPU's fallback takes whatever TVM lowers to blocks, by its first proposal: it computes what the function does, nvcc takes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.compilers import needs_nvcc
from support.relax_functions import model
from support.serial_programs import UNOPTIMISED
from support.thinned import at, every
from tvm.relax import op

from kerneldecl.arrays import integers_between, poisoned, random_array, relative_error
from kerneldecl.compiler.canonical import canonical_module, signature_of
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.compiler.input_values import allowed_values
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.model_import import read_model
from kerneldecl.compiler.reference import expected_outputs
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch
from kerneldecl.policies import gpu_elementwise, gpu_fallback
from kerneldecl.signature import Arg
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_fallback as template

H200 = load_arch(STANDARD, "h200")
FLOATS, INTS = "float32", "int64"
Shapes = list[tuple[tuple[int, ...], str]]
CASES: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "max_pool2d": (lambda _, x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1)), [((1, 8, 14, 14), FLOATS)]),
    "rows": (lambda _, x, i: op.take(x, i, axis=0), [((50, 12), FLOATS), ((7,), INTS)]),
    "elements": (lambda _, x, i: op.gather_elements(x, i, axis=1), [((10, 4), FLOATS), ((10, 3), INTS)]),
    "points": (lambda _, x, i: op.gather_nd(x, i), [((10, 4), FLOATS), ((3, 2), INTS)]),
    "arg_max": (lambda _, x: op.argmax(x, 1), [((10, 40), FLOATS)]),
    "arg_max_of_all": (lambda _, x: op.argmax(x), [((10, 40), FLOATS)]),
    "group_norm": (lambda _, x, g, b: op.nn.group_norm(x, g, b, 4, 1, [2]), [((2, 16, 20, 6), FLOATS), ((16,), FLOATS), ((16,), FLOATS)]),
    "instance_norm": (lambda _, x, g, b: op.nn.instance_norm(x, g, b, 1, [2]), [((2, 8, 40, 3), FLOATS), ((8,), FLOATS), ((8,), FLOATS)]),
    "split": (lambda _, x: op.split(op.nn.relu(x), 3, 1), [((10, 42), FLOATS)]),
    "where": (lambda _, a, x, y: op.where(a, x, y), [((10, 8), "bool"), ((10, 8), FLOATS), ((10, 8), FLOATS)]),
}

LONG = ("arg_max", "arg_max_of_all", "group_norm", "instance_norm")
"""Cases whose reductions are long enough for a whole thread block."""


def function(case: str) -> Any:
    """Return the function of one operator."""
    build, shapes = CASES[case]
    mod = read_model.fused(model(case, build, [np.zeros(shape, dtype) for shape, dtype in shapes], []).module)
    (func,) = (func for func in mod.functions.values() if isinstance(func, tvm.tirx.PrimFunc))
    return func


def scheduled(func: Any, across: bool | None = None) -> Any:
    """Return the function as its first proposal schedules it, or the first where threads reduce together, or where they do not."""
    mod = canonical_module(func)
    found = [dict(proposal.candidate.params) for proposal in gpu_fallback.propose(iter_space(mod), H200, 10)]
    return template.apply(mod, next(params for params in found if across in {None, params["across"]}), H200)


@pytest.mark.parametrize(("case", "across"), every(3, [*((case, False) for case in CASES), *((case, True) for case in LONG)]))
def test_what_is_proposed_computes_what_the_function_does(case: str, *, across: bool) -> None:
    func = function(case)
    args = [Arg(param.name, shape, dtype) for param, (shape, dtype) in zip(func.params, signature_of(func), strict=True)]
    count, rng, allowed = len(CASES[case][1]), np.random.default_rng(2), allowed_values(func)
    inputs = [
        integers_between(rng, arg, allowed[at].low, allowed[at].high) if at in allowed else random_array(rng, arg)
        for at, arg in enumerate(args[:count])
    ]
    outputs = [tvm.runtime.tensor(poisoned(arg)) for arg in args[count:]]
    kernel = tvm.tirx.build(serial(scheduled(func, across).mod), target=UNOPTIMISED)["main"]
    kernel(*map(tvm.runtime.tensor, inputs), *outputs)
    for got, want in zip(outputs, expected_outputs(func, inputs, args[count:]), strict=True):
        assert relative_error(got.numpy(), want) < 1e-4


def serial(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with loops in place of threads, which do not depend on one another here."""
    text = re.sub(r'T\.thread_binding\((T\.int64\(\d+\)|\d+), thread="[^"]+"\)', r"T.serial(\1)", mod.script())
    return tvm.script.from_source(text)


@needs_nvcc
@pytest.mark.parametrize("case", at({0, 2}, ["max_pool2d", "rows", "arg_max", "group_norm"]))
def test_nvcc_compiles_the_first_proposal(case: str, tmp_path: Path) -> None:
    assert compile_cuda_object(scheduled(function(case)).mod, H200, "kernel", LocalStore(tmp_path)).launches


def test_a_short_function_after_a_transpose_has_proposals() -> None:
    assert gpu_elementwise.propose(iter_space(canonical_module(function("points"))), H200, 1)
