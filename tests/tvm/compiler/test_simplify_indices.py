"""A reshape that is fused into its consumer leaves indices from which templates see what a thread reads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tvm
from support.repository import REPOSITORY
from tvm import relax

from kerneldecl.compiler import canonical
from kerneldecl.compiler.graph.simplify_indices import SimplifyIndices
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.model_import.read_model import fused
from kerneldecl.plugins.load import load_arch, load_module

SHAPES = {"merged heads": ((2, 32, 16), (1, 8, 8, 16)), "split rows": ((1, 6, 40), (3, 2, 10, 4))}


def masked(before: tuple[int, ...], after: tuple[int, ...]) -> tvm.IRModule:
    """Return a module that reshapes its input and adds a mask that is the same for the second axis."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(before, "float16"))
    mask = relax.Var("mask", relax.TensorType((after[0], 1, *after[2:]), "float16"))
    with builder.function("main", [x, mask]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.add(builder.emit(relax.op.reshape(x, after)), mask))
        builder.emit_func_output(out)
    return builder.get()


def only_function(mod: tvm.IRModule) -> Any:
    (found,) = (func for func in mod.functions.values() if isinstance(func, tvm.tirx.PrimFunc))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_a_thread_of_gpu_elementwise_reads_one_vector_of_each_operand(name: str) -> None:
    arch, mod = load_arch(REPOSITORY, "h200"), canonical.canonical_module(only_function(fused(masked(*SHAPES[name]))))
    (proposal, *_) = load_module("policies", REPOSITORY, "gpu_elementwise").propose(iter_space(mod), arch, 1)
    params = dict(proposal.candidate.params)
    sch = load_module("templates", REPOSITORY, "gpu_elementwise").apply(mod, params, arch)
    loops = [sch.get(loop) for loop in sch.get_loops(sch.get_sblock("x_local"))]
    assert math.prod(int(loop.extent) for loop in loops if loop.thread_binding is None) == params["width"]


@pytest.mark.parametrize("name", SHAPES)
def test_it_computes_what_it_did(name: str) -> None:
    before, after = SHAPES[name]
    mod = masked(before, after)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype("float16") for shape in (before, (after[0], 1, *after[2:]))]
    func = only_function(SimplifyIndices()(fused(mod)))
    out = tvm.runtime.tensor(np.zeros(after, "float16"))
    tvm.compile(canonical.canonical_module(func), "llvm")["main"](*map(tvm.runtime.tensor, inputs), out)
    np.testing.assert_array_equal(out.numpy(), inputs[0].reshape(after) + inputs[1])
