"""Owns the tests of models of dynamic shape: shape buckets get entries and kernels, dispatched at run time.

Knows nothing of how functions are matched.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.spaces import Space
from tvm import relax
from tvm.script import ir as I  # noqa: N812
from tvm.script import relax as R  # noqa: N812

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import target_of
from kerneldecl.compiler.dynamic_shapes import callees, with_shape_buckets
from kerneldecl.compiler.model_import import read_model
from kerneldecl.errors import UnmatchedError
from kerneldecl.hardware import host
from kerneldecl.relax import TIR_PIPELINE, ApplyArtifact, ShapeBuckets, load_model, pipeline

RNG = np.random.default_rng(8)
BUCKETS = {"n": (1, 8)}


@I.ir_module
class Rows:
    @R.function
    def main(x: R.Tensor(("n", 32), "float32"), w: R.Tensor((32, 24), "float32"), b: R.Tensor((24,), "float32")):  # noqa: ANN201, N805
        with R.dataflow():
            y = R.nn.relu(R.add(R.matmul(x, w), b))
            R.output(y)
        return y


@I.ir_module
class Grid:
    @R.function
    def main(x: R.Tensor(("n", "m"), "float32"), y: R.Tensor(("m",), "float32")):  # noqa: ANN201, N805
        with R.dataflow():
            s = R.add(x, y)
            t = R.nn.relu(y)
            R.output(s, t)
        return s, t


def inputs(rows: int) -> list[Any]:
    return [RNG.standard_normal(shape, dtype=np.float32) for shape in ((rows, 32), (32, 24), (24,))]


def reference(x: Any, w: Any, b: Any) -> Any:
    return np.maximum(x @ w + b, 0)


def run(machine: Any, arrays: list[Any]) -> Any:
    return machine["main"](*map(tvm.runtime.tensor, arrays))


def machine_of(mod: tvm.IRModule) -> Any:
    return relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())


# The dispatch


def test_each_bucket_has_a_copy_and_other_shapes_share_one() -> None:
    mod = with_shape_buckets(Rows, BUCKETS)
    assert {var.name_hint for var in mod.get_global_vars()} == {"main", "main_n1", "main_n8", "main_any"}
    assert [int(extent) for extent in mod["main_n8"].params[0].ty.shape] == [8, 32]
    machine = machine_of(mod)
    for rows in (1, 8, 5):
        arrays = inputs(rows)
        np.testing.assert_allclose(run(machine, arrays).numpy(), reference(*arrays), rtol=1e-4, atol=1e-5)


def test_the_copy_of_the_bucket_runs() -> None:
    mod = with_shape_buckets(Rows, BUCKETS)
    copy = mod["main_n8"]
    zeros = relax.const(np.zeros((8, 24), "float32"))
    mod.update_func(mod.get_global_var("main_n8"), relax.Function(copy.params, zeros, copy.ret_ty, attrs=copy.attrs))
    machine = machine_of(mod)
    assert not run(machine, inputs(8)).numpy().any()
    assert all(run(machine, inputs(rows)).numpy().any() for rows in (1, 5))


def test_every_combination_of_two_dimensions_has_a_copy_and_tuples_come_out() -> None:
    mod = with_shape_buckets(Grid, {"n": (1, 4), "m": (8,)})
    assert {"main_n1_m8", "main_n4_m8", "main_any"} <= {var.name_hint for var in mod.get_global_vars()}
    machine = machine_of(mod)
    for shape in ((1, 8), (4, 8), (4, 6)):
        x, y = RNG.standard_normal(shape, dtype=np.float32), RNG.standard_normal(shape[1:], dtype=np.float32)
        s, t = run(machine, [x, y])
        np.testing.assert_allclose(s.numpy(), x + y, rtol=1e-6)
        np.testing.assert_array_equal(t.numpy(), np.maximum(y, 0))


def test_a_model_is_left_as_it_was() -> None:
    before = Rows.script()
    with_shape_buckets(Rows, BUCKETS)
    assert Rows.script() == before


@pytest.mark.parametrize(
    ("mod", "buckets", "message"),
    [
        (Rows, {"m": (1,)}, "the model has no dynamic dimension m; its dynamic dimensions are n"),
        (with_shape_buckets(Rows, BUCKETS)["main_n1"], {"n": (1,)}, "all its shapes are static"),
        (Rows, {"n": (0, 1)}, "the sizes of n are 0, 1; expected different integers above 0"),
        (Rows, {"n": (2, 2)}, "the sizes of n are 2, 2"),
        (Rows, {"n": ()}, "the sizes of n are none"),
        (Grid, {"n": range(1, 10), "m": range(1, 10)}, "these sizes make 81 copies of the model; at most 64 are made"),
    ],
    ids=["unknown", "static", "zero", "twice", "none", "many"],
)
def test_impossible_buckets_are_refused(mod: Any, buckets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShapeBuckets(buckets)(mod if isinstance(mod, tvm.IRModule) else tvm.IRModule({"main": mod.with_attr("global_symbol", "main")}))


# From extraction to results


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace with an artifact of the model's functions for the declared buckets."""
    space = Space(tmp_path_factory.mktemp("rows"))
    space.write({"rows.json": tvm.ir.save_json(Rows)})
    space.run_here("extract", "rows.json", "--dim", "n=1,8")
    space.edit("workloads.toml", "\n[target.host]", "\n[defaults]\ntop_k = 1\n\n[target.host]")
    space.run_here("build", "--jobs", "1")
    return space


def declared(space: Space) -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = tomllib.loads(space.read("workloads.toml"))["workload"]
    return tables


def test_buckets_have_entries_and_the_rest_is_reported(built: Space) -> None:
    assert sorted(table["m"] for table in declared(built)) == [1, 8]
    assert all(table["tags"] == ["rows", "rows.calls-1"] for table in declared(built))
    found = built.run_json_here("extract", "rows.json", "--dim", "n=1,8")
    assert (found["new"], found["gone"], len(found["known"])) == ([], [], 2)
    (left_out,) = found["left_out"]
    assert left_out == {"name": "other sizes", "reason": "1 function computes sizes that are not declared, by TVM's default schedule"}


def test_functions_shared_by_copies_are_counted_once() -> None:
    @I.ir_module
    class Shared:
        @R.function
        def main(x: R.Tensor(("n", 32), "float32"), w: R.Tensor((32, 24), "float32")):  # noqa: ANN202, N805
            with R.dataflow():
                y = R.matmul(x, R.sin(w))
                R.output(y)
            return y

    mod = read_model.fused(with_shape_buckets(Shared, BUCKETS))
    calls = {tuple(canonical.signature_of(func)): count for name, func, count in read_model.called(mod) if "sin" in name}
    assert calls == {(((32, 24), "float32"), ((32, 24), "float32")): 1}
    assert sum(len([name for name in callees(func) if "sin" in name]) for func in functions(mod)) == 3


def functions(mod: tvm.IRModule) -> list[Any]:
    return [func for func in mod.functions.values() if isinstance(func, relax.Function)]


@pytest.mark.parametrize("form", ["schedule", "binary"])
def test_a_dynamic_model_uses_the_kernels_of_its_buckets(built: Space, form: Any, tmp_path: Path) -> None:
    target = target_of(host.detect())
    passes = pipeline(built.artifact(), target, form, strict=True)
    executable = relax.build(ShapeBuckets(BUCKETS)(Rows), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    assert passes.report is not None
    assert sorted(match.outcome for match in passes.report.matches) == ["hit", "hit", "other sizes"]
    assert passes.report.unused == ()
    executable.export_library(str(tmp_path / "rows.so"))
    machine = load_model(tmp_path / "rows.so", built.artifact())
    for rows in (1, 8, 5):
        arrays = inputs(rows)
        np.testing.assert_allclose(run(machine, arrays).numpy(), reference(*arrays), rtol=1e-4, atol=1e-5)


def test_a_dynamic_function_without_buckets_is_a_miss_that_strict_raises(built: Space) -> None:
    target = target_of(host.detect())
    with target, pytest.raises(UnmatchedError, match=r"miss .*dynamic extent: \[n, 32\]"):
        ApplyArtifact(built.artifact(), strict=True)(read_model.fused(Rows))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dim", "m=1"], "rows.json: the model has no dynamic dimension m; its dynamic dimensions are n"),
        (["--dim", "n"], "--dim n: not a dimension with its sizes; expected each dimension once, such as --dim n=1,16,128"),
        (["--dim", "n=1", "--dim", "n=2"], "--dim n=2: the sizes of n are given already; expected each dimension once"),
        (["--dim", "n=0"], "the sizes of n are 0; expected different integers above 0"),
    ],
    ids=["unknown", "text", "twice", "zero"],
)
def test_a_wrong_dim_ends_with_a_sentence(space: Space, arguments: list[str], message: str) -> None:
    space.write({"rows.json": tvm.ir.save_json(Rows)})
    assert message in space.run_here("extract", "rows.json", *arguments, code=2).stderr
    assert not (space.root / "workloads.toml").exists()
