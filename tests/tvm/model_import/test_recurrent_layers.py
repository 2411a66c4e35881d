"""Recurrent layers of ONNX: right in both directions, as many functions whatever the steps are, one GEMM for what all steps read."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from emulation import emulate
from onnx import helper, numpy_helper
from support.compilers import needs_nvcc
from support.thinned import at
from tvm import relax

from kerneldecl.arrays import poisoned, random_array, relative_error
from kerneldecl.compiler.canonical import canonical_module, signature_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.model_import.from_onnx import module_of_model
from kerneldecl.compiler.model_import.half_precision import half_precision
from kerneldecl.compiler.model_import.read_model import called, function_problem, fused
from kerneldecl.compiler.model_import.recurrent_steps import MADE_OF
from kerneldecl.compiler.reference import expected_outputs
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch
from kerneldecl.policies import gpu_elementwise
from kerneldecl.signature import Arg
from kerneldecl.templates import gpu_elementwise as template

H200 = load_arch(STANDARD, "h200")
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
BATCH, INPUTS, HIDDEN = 3, 5, 4


def model_of(kind: str, steps: int, *, directions: int = 1, **attrs: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a model of one layer, and its weights and states."""
    rng, rows = np.random.default_rng(1), GATES[kind] * HIDDEN
    shapes = {"W": (directions, rows, INPUTS), "R": (directions, rows, HIDDEN), "B": (directions, 2 * rows)}
    states = dict.fromkeys(("h", "c") if kind == "LSTM" else ("h",), (directions, BATCH, HIDDEN))
    values = {name: rng.standard_normal(shape).astype("float32") for name, shape in {**shapes, **states}.items()}
    direction = attrs.pop("direction", "bidirectional" if directions == 2 else "forward")
    results = ["Y", "Y_h", *(["Y_c"] if kind == "LSTM" else [])]
    node = helper.make_node(
        kind, ["X", "W", "R", "B", "", *states], results, hidden_size=HIDDEN, direction=direction, name="layer", **attrs
    )
    tensor = onnx.TensorProto.FLOAT
    outputs = [helper.make_tensor_value_info(name, tensor, None) for name in results]
    inits = [numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = helper.make_graph([node], "net", [helper.make_tensor_value_info("X", tensor, (steps, BATCH, INPUTS))], outputs, inits)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), values


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def stepped(kind: str, x: np.ndarray, weights: dict[str, np.ndarray], *, reset_first: bool) -> list[np.ndarray]:
    """Return the hidden states of all steps, and the last states, by the equations in ONNX's specification."""
    w, r, bias, h = (weights[name].astype(np.float64) for name in ("W", "R", "B", "h"))
    wb, rb = np.split(bias, 2)
    c, found = weights.get("c"), []
    for row in x.astype(np.float64):
        of_x, of_h = row @ w.T + wb, h @ r.T + rb
        if kind == "LSTM":
            i, o, f, new = np.split(of_x + of_h, 4, axis=-1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(new)
            h = sigmoid(o) * np.tanh(c)
        elif kind == "GRU":
            (zx, rx, nx), (zh, rh, nh) = np.split(of_x, 3, axis=-1), np.split(of_h, 3, axis=-1)
            update, reset = sigmoid(zx + zh), sigmoid(rx + rh)
            new = np.tanh(nx + ((reset * h) @ r[2 * HIDDEN :].T + rb[2 * HIDDEN :] if reset_first else reset * nh))
            h = (1 - update) * new + update * h
        else:
            h = np.tanh(of_x + of_h)
        found.append(h)
    return [np.stack(found), h, *([c] if kind == "LSTM" else [])]


@pytest.mark.parametrize(
    ("kind", "options"),
    at(
        {0, 2},
        [
            ("LSTM", {"directions": 2}),
            ("LSTM", {"direction": "reverse"}),
            ("GRU", {}),
            ("GRU", {"linear_before_reset": 1, "directions": 2}),
            ("RNN", {}),
        ],
    ),
    ids=str,
)
def test_results_are_those_of_the_equations(kind: str, options: dict[str, Any]) -> None:
    model, values = model_of(kind, steps=19, **options)
    x = np.random.default_rng(2).standard_normal((19, BATCH, INPUTS)).astype("float32")
    machine = relax.VirtualMachine(relax.build(fused(module_of_model(model)), "llvm"), tvm.cpu())
    got = [each.numpy() for each in machine["main"](tvm.runtime.tensor(x))]
    reset_first = not options.get("linear_before_reset")
    for direction in range(options.get("directions", 1)):
        own, is_reverse = {name: value[direction] for name, value in values.items()}, direction == 1 or "direction" in options
        y, *states = stepped(kind, x[::-1] if is_reverse else x, own, reset_first=reset_first)
        for have, want in zip(
            (got[0][:, direction], *(each[direction] for each in got[1:])), (y[::-1] if is_reverse else y, *states), strict=True
        ):
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "in_a_step"), at({0, 1}, [("LSTM", 3), ("GRU", 4), ("RNN", 2)]))
def test_steps_share_their_functions(kind: str, in_a_step: int) -> None:
    """The first step's GEMM has other operands, where the initial state is a constant it is none."""
    short, long = (called(fused(module_of_model(model_of(kind, steps)[0]))) for steps in (20, 60))
    assert [name for name, _, _ in long if "joined" not in name] == [name for name, _, _ in short if "joined" not in name]
    counts = {name: count for name, _, count in long}
    assert sum(59 <= count <= 60 for count in counts.values()) == in_a_step
    # One GEMM for what all steps read, and their hidden states joined sixteen at a time.
    assert sum(counts.values()) <= 60 * in_a_step + 12


@pytest.mark.parametrize("kind", GATES)
def test_each_function_can_be_an_entry(kind: str) -> None:
    for name, func, _ in called(fused(module_of_model(model_of(kind, steps=20)[0]))):
        assert not function_problem(func), name


def test_time_grows_with_the_steps_and_not_with_their_square() -> None:
    def secs(steps: int) -> float:
        model, _ = model_of("LSTM", steps)
        start = time.process_time()
        fused(module_of_model(model))
        return time.process_time() - start

    secs(8)  # imports
    assert secs(256) < 16 * secs(32)


@pytest.mark.parametrize("kind", GATES)
def test_a_half_precision_model_has_the_functions_of_that_dtype(kind: str) -> None:
    mod = half_precision(module_of_model(model_of(kind, steps=20)[0]), "float16")
    found = called(fused(mod))
    assert len(found) == len(called(fused(module_of_model(model_of(kind, steps=20)[0]))))
    assert {str(param.dtype) for _, func, _ in found for param in func.params} == {"float16", "int64"}


@needs_nvcc
@pytest.mark.parametrize(("kind", "name"), at({0}, [("LSTM", "lstm_cell"), ("LSTM", "lstm_hidden"), ("GRU", "gru_hidden_of_new")]))
def test_functions_of_elements_are_right_on_the_emulated_gpu(kind: str, name: str) -> None:
    """By the first proposal of the elementwise policy: a function that reads the step's number from an argument needs no fallback."""
    found = called(fused(half_precision(module_of_model(model_of(kind, steps=20)[0]), "float16")))
    func = next(func for _, func, _ in found if len(func.params) > 4 and name in str(func.attrs[MADE_OF]))
    mod = canonical_module(func)
    first, *_ = gpu_elementwise.propose(iter_space(mod), H200, 1)
    made = template.apply(mod, dict(first.candidate.params), H200)
    assert made is not None
    rng, args = np.random.default_rng(5), [Arg(f"x{at}", shape, dtype) for at, (shape, dtype) in enumerate(signature_of(func))]
    inputs = [np.array([7]) if arg.dtype == "int64" else random_array(rng, arg) for arg in args[:-1]]
    *_, got = emulate(made.mod["main"], *inputs, poisoned(args[-1]))
    (want,) = expected_outputs(func, inputs, args[-1:])
    assert relative_error(got, want) < 2e-3
