"""Memory-bound kernels on the CPU: every proposed candidate computes what NumPy computes, and traces replay elsewhere."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from support.cpus import SSE, runnable
from support.thinned import every
from tvm import te, tirx
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

from kerneldecl.arrays import Array, is_float, numpy_dtype, poisoned, random_array, relative_error
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Proposal
from kerneldecl.signature import Arg

ARCH = runnable(replace(SSE, vector_bytes=32))
TARGET = tvm.target.Target(dict(ARCH.tvm_target))
ELEMENTWISE, REDUCE, ROWWISE, GEMV, FALLBACK = "cpu_elementwise", "cpu_reduce", "cpu_rowwise", "cpu_gemv", "cpu_fallback"
TOLERANCE = {"float16": 5e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}


@dataclass(frozen=True)
class Case:
    """A function with its reference in NumPy."""

    mod: tvm.IRModule
    reference: Callable[..., Array]

    def args(self) -> list[Arg]:
        types = [param.ty for param in self.mod["main"].params]
        return [Arg(f"x{at}", tuple(int(extent) for extent in ty.shape), str(ty.dtype)) for at, ty in enumerate(types)]

    def check(self, sch: Any) -> None:
        """Build and run a schedule on random inputs and a poisoned output."""
        rng = np.random.default_rng(0)
        *inputs, out = self.args()
        arrays = [random_array(rng, arg) for arg in inputs]
        # Sums and squares of signed integers must not wrap around, as the reference's do not.
        arrays = [array // 32 if arg.dtype.startswith("int") else array for array, arg in zip(arrays, inputs, strict=True)]
        result = tvm.runtime.tensor(poisoned(out))
        tvm.tirx.build(sch.mod, target=TARGET)["main"](*(tvm.runtime.tensor(array) for array in arrays), result)
        wide = [array.astype(np.float64 if is_float(arg.dtype) else np.int64) for array, arg in zip(arrays, inputs, strict=True)]
        want = np.asarray(self.reference(*wide)).astype(numpy_dtype(out.dtype))
        error = relative_error(result.numpy(), want)
        assert error <= TOLERANCE.get(out.dtype, 0.0), f"relative error {error}"


def policy(name: str) -> ModuleType:
    return importlib.import_module(f"kerneldecl.policies.{name}")


def proposals(name: str, mod: tvm.IRModule, top_k: int = 20) -> tuple[Proposal, ...]:
    return policy(name).propose(iter_space(mod), ARCH, top_k)  # type: ignore[no-any-return]


def schedules(name: str, mod: tvm.IRModule) -> Iterator[Any]:
    """Apply every candidate that a policy proposes, and return schedules of distinct modules; at least one must apply.

    Compiling takes nearly all of the time, so it is every second module: neighbours in rank hardly differ, and there are many functions.
    """
    proposed = proposals(name, mod)
    template = importlib.import_module(f"kerneldecl.templates.{name}")
    applied = [template.apply(mod, dict(proposal.candidate.params), ARCH) for proposal in proposed]
    assert any(applied), f"none of {len(proposed)} candidates applies"
    distinct = {tvm_ffi.structural_hash(sch.mod): sch for sch in applied if sch is not None}
    yield from list(distinct.values())[::2]


def case(reference: Callable[..., Array], *tensors: Any) -> Case:
    func = te.create_prim_func(list(tensors), index_dtype_override="int64")
    return Case(tvm.IRModule({"main": func.with_attr({"global_symbol": "main", "tirx.noalias": True})}), reference)


def tensor(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return te.placeholder(shape, dtype, name)


def const(value: float, dtype: str) -> Any:
    return tirx.const(value, dtype)


# Functions


def chain(shape: tuple[int, ...], dtype: str = "float32") -> Case:
    """A broadcast bias, a block read twice, a cast: |x + b| * (x + b)."""
    x, b = tensor("X", shape, dtype), tensor("b", shape[-1:], dtype)
    biased = te.compute(shape, lambda *i: x(*i) + b(i[-1]), "biased")
    positive = te.compute(shape, lambda *i: tirx.max(biased(*i), const(0, dtype) - biased(*i)), "positive")
    out = te.compute(shape, lambda *i: positive(*i) * biased(*i), "Y")
    return case(lambda x, b: np.abs(x + b) * (x + b), x, b, out)


def activation(shape: tuple[int, ...]) -> Case:
    x = tensor("X", shape)
    sigmoid = te.compute(shape, lambda *i: tirx.sigmoid(x(*i)), "sigmoid")
    return case(lambda x: x / (1 + np.exp(-x)), x, te.compute(shape, lambda *i: x(*i) * sigmoid(*i), "Y"))


def transpose(shape: tuple[int, ...], axes: tuple[int, ...], dtype: str = "float32") -> Case:
    x = tensor("X", shape, dtype)
    source = [axes.index(axis) for axis in range(len(axes))]
    out = te.compute([shape[axis] for axis in axes], lambda *i: x(*(i[at] for at in source)), "Y")
    return case(lambda x: x.transpose(axes), x, out)


def reduction(shape: tuple[int, ...], axes: tuple[int, ...], op: str = "sum", dtype: str = "float32") -> Case:
    """Reduce the square of x; the mean is cast to the output's dtype after division."""
    x = tensor("X", shape, dtype)
    accum = "float32" if dtype in {"float16", "bfloat16"} else dtype
    over = [te.reduce_axis((0, shape[axis]), f"k{axis}") for axis in axes]
    square = te.compute(shape, lambda *i: x(*i).astype(accum) * x(*i).astype(accum), "square")
    combine = {"sum": te.sum, "mean": te.sum, "max": te.max, "min": te.min}[op]

    def element(*i: Any) -> Any:
        kept, terms = iter(i), dict(zip(axes, over, strict=True))
        return combine(square(*(terms[axis] if axis in terms else next(kept) for axis in range(len(shape)))), axis=over)

    out = te.compute([extent for axis, extent in enumerate(shape) if axis not in axes], element, "reduced")
    count = int(np.prod([shape[axis] for axis in axes]))
    if op == "mean":
        out = te.compute(out.shape, lambda *i: (out(*i) / const(count, accum)).astype(dtype), "Y")
    elif accum != dtype:
        out = te.compute(out.shape, lambda *i: out(*i).astype(dtype), "Y")
    return case(lambda x: getattr(np, op)(x * x, axis=axes), x, out)


def softmax(shape: tuple[int, ...], axis: int = -1) -> Case:
    x = tensor("X", shape)
    at = axis % len(shape)
    rows = shape[:at] + shape[at + 1 :]
    k, n = te.reduce_axis((0, shape[at]), "k"), te.reduce_axis((0, shape[at]), "n")
    high = te.compute(rows, lambda *i: te.max(x(*i[:at], k, *i[at:]), axis=k), "high")
    power = te.compute(shape, lambda *i: tirx.exp(x(*i) - high(*i[:at], *i[at + 1 :])), "power")
    total = te.compute(rows, lambda *i: te.sum(power(*i[:at], n, *i[at:]), axis=n), "total")

    def reference(x: Array) -> Array:
        powers = np.exp(x - x.max(axis=at, keepdims=True))
        return np.asarray(powers / powers.sum(axis=at, keepdims=True))

    return case(reference, x, te.compute(shape, lambda *i: power(*i) / total(*i[:at], *i[at + 1 :]), "Y"))


def layer_norm(shape: tuple[int, ...], dtype: str = "float32") -> Case:
    """Normalise over the last axis, in float32: two reductions, the second of which reads a result of the first."""
    *rows, columns = shape
    x, g = tensor("X", shape, dtype), tensor("g", (columns,), dtype)
    k, n = te.reduce_axis((0, columns), "k"), te.reduce_axis((0, columns), "n")
    wide = te.compute(shape, lambda *i: x(*i).astype("float32"), "wide")
    total = te.compute(rows, lambda *i: te.sum(wide(*i, k), axis=k), "total")
    mean = te.compute(rows, lambda *i: total(*i) / const(columns, "float32"), "mean")
    square = te.compute(rows, lambda *i: te.sum((wide(*i, n) - mean(*i)) * (wide(*i, n) - mean(*i)), axis=n), "square")

    def element(*i: Any) -> Any:
        scale = tirx.rsqrt(square(*i[:-1]) / const(columns, "float32") + const(1e-3, "float32"))
        return ((wide(*i) - mean(*i[:-1])) * scale * g(i[-1]).astype("float32")).astype(dtype)

    def reference(x: Array, g: Array) -> Array:
        return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * g)

    return case(reference, x, g, te.compute(shape, element, "Y"))


def gemv(n: int, k: int, layout: str = "n", dtype: str = "float32") -> Case:
    """A GEMV with a matrix in either layout, a bias and relu; accumulators of narrow dtypes are wide."""
    accum = {"float16": "float32", "bfloat16": "float32", "int8": "int32"}.get(dtype, dtype)
    w, x, b = tensor("W", (n, k) if layout == "n" else (k, n), dtype), tensor("x", (1, k), dtype), tensor("b", (n,), accum)
    r = te.reduce_axis((0, k), "k")
    read = (lambda j: w[j, r]) if layout == "n" else (lambda j: w[r, j])
    gemm = te.compute((1, n), lambda i, j: te.sum(x[i, r].astype(accum) * read(j).astype(accum), axis=r), "gemv")
    biased = te.compute((1, n), lambda i, j: gemm[i, j] + b[j], "biased")
    relu = te.compute((1, n), lambda i, j: tirx.max(biased[i, j], const(0, accum)), "Y")
    return case(lambda w, x, b: np.maximum(x @ (w.T if layout == "n" else w) + b, 0), w, x, b, relu)


def gemv_i4(n: int, k: int, group: int, separate: bool) -> Case:
    """A GEMV with 4-bit weights, two per byte, dequantised inline or in a block of its own."""
    w, scale, x = tensor("W", (n, k // 2), "uint8"), tensor("scale", (n, k // group)), tensor("x", (k,))

    def weight(row: Any, g: Any, byte: Any, nibble: Any) -> Any:
        bits = (w[row, g * (group // 2) + byte] >> (nibble * 4).astype("uint8")) & const(15, "uint8")
        return (bits.astype("float32") - 8.0) * scale[row, g]

    shape = (n, k // group, group // 2, 2)
    weights = te.compute(shape, weight, "weights") if separate else weight
    g, byte, nibble = (te.reduce_axis((0, extent), name) for extent, name in zip(shape[1:], ("group", "byte", "nibble"), strict=True))
    out = te.compute((n,), lambda i: te.sum(weights(i, g, byte, nibble) * x[g * group + byte * 2 + nibble], axis=[g, byte, nibble]), "Y")

    def reference(w: Array, scale: Array, x: Array) -> Array:
        nibbles = np.stack([w & 15, w >> 4], axis=-1).reshape(n, k)
        return np.asarray(((nibbles - 8) * scale.repeat(group, axis=1)) @ x)

    return case(reference, w, scale, x, out)


def matmul(m: int, n: int, k: int) -> Case:
    a, b, r = tensor("A", (m, k)), tensor("B", (k, n)), te.reduce_axis((0, k), "k")
    return case(np.matmul, a, b, te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), "C"))


CASES = [
    *((ELEMENTWISE, chain, (shape,)) for shape in [(1,), (7,), (1, 1), (5, 37), (3, 1, 64)]),
    *((ELEMENTWISE, chain, ((9, 33), dtype)) for dtype in ("float16", "bfloat16", "float64", "int8", "int32")),
    *((ELEMENTWISE, activation, (shape,)) for shape in [(130,), (3, 5, 7)]),
    *((ELEMENTWISE, transpose, args) for args in [((5, 7), (1, 0)), ((64, 48), (1, 0), "float16"), ((1, 17), (1, 0))]),
    *((ELEMENTWISE, transpose, args) for args in [((2, 3, 4, 5), (0, 2, 3, 1)), ((2, 5, 70), (1, 0, 2), "int8")]),
    *((REDUCE, reduction, args) for args in [((5, 7), (1,)), ((5, 7), (0,)), ((33, 129), (1,), "max"), ((64, 130), (0,), "min")]),
    *((REDUCE, reduction, args) for args in [((64, 32), (0, 1)), ((1031,), (0,)), ((3, 40, 50), (1,), "mean"), ((1, 1), (1,))]),
    *((REDUCE, reduction, args) for args in [((6, 7, 10, 50), (1, 3), "mean"), ((300, 1), (0,)), ((1, 300), (1,)), ((4, 1, 33), (1, 2))]),
    *((REDUCE, reduction, ((33, 70), (1,), "mean", dtype)) for dtype in ("float16", "bfloat16", "float64")),
    *((REDUCE, reduction, ((9, 70), (axis,), "sum", "int32")) for axis in (0, 1)),
    *((ROWWISE, softmax, (shape,)) for shape in [(7, 6), (9, 67), (3, 4, 64), (1, 100)]),
    *((ROWWISE, layer_norm, args) for args in [((6, 64),), ((3, 2, 45),), ((5, 37), "float16"), ((1, 1, 9),)]),
    *((GEMV, gemv, (n, k, layout)) for layout in "nt" for n, k in [(1, 300), (33, 45), (130, 1)]),
    *((GEMV, gemv, (n, 19, "t")) for n in (320, 579, 1031)),
    *((GEMV, gemv, (16, 67, layout, dtype)) for layout, dtype in [("n", "int8"), ("t", "float16")]),
    *((GEMV, gemv_i4, args) for args in [(1, 32, 16, True), (12, 256, 128, True), (12, 256, 128, False), (33, 96, 6, False)]),
    *((FALLBACK, softmax, (shape, axis)) for shape, axis in [((4, 5, 33), 1), ((33,), 0), ((4, 16), 0), ((5, 1), 1)]),
    *((FALLBACK, make, args) for make, args in [(matmul, (7, 33, 5)), (matmul, (16, 32, 8)), (layer_norm, ((4, 9),))]),
]


@pytest.mark.parametrize(
    ("name", "make", "args"), every(9, CASES), ids=lambda value: getattr(value, "__name__", str(value)).replace(" ", "")
)
def test_all_proposed_candidates_compute_the_reference(name: str, make: Any, args: Any) -> None:
    made = make(*args)
    for sch in schedules(name, made.mod):
        made.check(sch)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        (ELEMENTWISE, reduction((8, 8), (1,))),
        (REDUCE, chain((8, 8))),
        (REDUCE, softmax((8, 8))),
        (ROWWISE, softmax((4, 5, 6), axis=1)),
        (ROWWISE, reduction((8, 8), (1,))),
        (GEMV, reduction((8, 8), (1,))),
        (GEMV, matmul(16, 16, 16)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_policies_leave_other_functions_alone(name: str, made: Case) -> None:
    assert proposals(name, made.mod) == ()


SUITED = {
    ELEMENTWISE: transpose((32, 48), (1, 0)),
    REDUCE: reduction((4, 67), (1,)),
    ROWWISE: layer_norm((4, 67)),
    GEMV: gemv_i4(8, 256, 128, separate=True),
    FALLBACK: matmul(8, 32, 4),
}
"""For each template a function that it schedules."""


@pytest.mark.parametrize(("other", "template"), every(3, SUITED, SUITED))
def test_unsuitable_functions_give_none_and_never_an_error(template: str, other: str) -> None:
    """Parameters made for one function are tried on all others: what applies by chance must compute the reference."""
    apply = importlib.import_module(f"kerneldecl.templates.{template}").apply
    for proposal in proposals(template, SUITED[template].mod, top_k=3):
        sch = apply(SUITED[other].mod, dict(proposal.candidate.params), ARCH)
        if sch is not None:
            SUITED[other].check(sch)


@pytest.mark.parametrize("vectors", [1, 2, 4])
def test_rows_that_half_vectors_divide_have_no_partial_iteration(vectors: int) -> None:
    """Iterations with a predicate would be computed element by element."""
    made = softmax((9, 68))
    sch = importlib.import_module(f"kerneldecl.templates.{ROWWISE}").apply(made.mod, {"vectors": vectors, "parallel": False}, ARCH)
    assert "pragma_loop_partition_hint" not in sch.mod.script()
    made.check(sch)


@pytest.mark.parametrize("columns", [64, 192, 320, 579])
def test_many_columns_are_a_loop_of_vectors(columns: int) -> None:
    """As one vector, each of its registers would have instructions of its own."""
    made = gemv(2 * columns, 19, "t")
    params = {"columns": columns, "steps": 4, "chunks": 1, "parallel": False}
    sch = importlib.import_module(f"kerneldecl.templates.{GEMV}").apply(made.mod, params, ARCH)
    vectors = set(re.findall(r"T\.vectorized\((?:T\.int64\()?(\d+)", sch.mod.script()))
    assert vectors == ({"64"} if columns % 64 == 0 else set())
    made.check(sch)


def test_fallback_ends_with_the_function_as_it_is() -> None:
    made = SUITED[FALLBACK]
    *_, plain = proposals(FALLBACK, made.mod)
    last = importlib.import_module("kerneldecl.templates.cpu_fallback").apply(made.mod, dict(plain.candidate.params), ARCH)
    assert tvm_ffi.structural_equal(last.mod, made.mod)


REPLAY = """
import json, sys
sys.modules["torch"] = None  # which tvm_ffi imports where it is installed: it takes seconds
import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase
found = {}
for folder in sys.argv[1:]:
    database = JSONDatabase(work_dir=folder)
    (record,) = database.get_all_tuning_records()
    sch = tvm.s_tir.Schedule(record.workload.mod)
    record.trace.apply_to_schedule(sch, remove_postproc=False)
    found[folder] = tvm.ir.save_json(sch.mod)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_traces_replay_in_another_process_from_a_database(tmp_path: Path) -> None:
    made: dict[str, Any] = {}
    for name, function in SUITED.items():
        folder = tmp_path / name
        folder.mkdir()
        sch = next(schedules(name, function.mod))
        database = JSONDatabase(work_dir=str(folder))
        workload = database.commit_workload(function.mod)
        args = ArgInfo.from_entry_func(function.mod, remove_preproc=False)
        database.commit_tuning_record(TuningRecord(sch.trace, workload, [1.0], TARGET, args))
        made[str(folder)] = sch.mod
    out = subprocess.run([sys.executable, "-c", REPLAY, *made], check=True, capture_output=True, text=True).stdout
    replayed = {folder: tvm.ir.load_json(text) for folder, text in json.loads(out).items()}
    assert [folder for folder, mod in made.items() if not tvm_ffi.structural_equal(mod, replayed[folder])] == []
