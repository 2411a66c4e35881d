"""Owns the tests of functions without a kernel: TVM's default schedule, plain ones, verification, and what the report says of them.

Knows nothing of how functions are matched. GPU code is compiled here, and run by the emulator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from emulation import Kernel
from support.compilers import needs_nvcc
from support.spaces import REAL, Space
from support.thinned import at
from tvm import relax, te, tirx, topi
from tvm.script import tirx as T  # noqa: N812

from kerneldecl.errors import ToolchainError
from kerneldecl.hardware import host
from kerneldecl.relax import TIR_PIPELINE, DefaultSchedules, export_model, load_model, pipeline, target_of
from kerneldecl.relax.verification import verification

RNG = np.random.default_rng(3)
H200 = tvm.target.Target({"kind": "cuda", "arch": "sm_90", "max_num_threads": 1024, "max_shared_memory_per_block": 49152})
HERE = tvm.target.Target({"kind": "llvm", "mcpu": dict(host.detect().tvm_target).get("mcpu", "")})
ENTRIES = """
[[workload]]
name = "relu"
rule = "elementwise"
op = "relu"
shape = [3, 4, 5]
policy = "cpu_fallback"
tags = ["net", "net.calls-1"]

[[workload]]
name = "gemm"
rule = "matmul"
m = 16
n = 16
k = 16
policy = "plain"
tags = ["net", "net.calls-3"]
"""


@T.prim_func(s_tir=True, private=True)
def row_by_row(  # noqa: ANN201
    X: T.Buffer((T.int64(8), T.int64(16)), "float32"),  # noqa: N803
    Y: T.Buffer((T.int64(8), T.int64(16)), "float32"),  # noqa: N803
):
    """Two blocks in one loop, over which TVM's default GPU schedules stumble."""
    total = T.sblock_alloc_buffer((T.int64(8),), "float32")
    for i in range(T.int64(8)):
        for j in range(T.int64(16)):
            with T.sblock("sum"):
                vi, vj = T.axis.remap("SR", [i, j])
                T.reads(X[vi, vj])
                T.writes(total[vi])
                with T.init():
                    total[vi] = T.float32(0)
                total[vi] = total[vi] + X[vi, vj]
        for j in range(T.int64(16)):
            with T.sblock("subtract"):
                vi, vj = T.axis.remap("SS", [i, j])
                T.reads(X[vi, vj], total[vi])
                T.writes(Y[vi, vj])
                Y[vi, vj] = X[vi, vj] - total[vi]


@T.prim_func(s_tir=True, private=True)
def without_blocks(X: T.Buffer((T.int64(8),), "float32"), Y: T.Buffer((T.int64(8),), "float32")):  # noqa: ANN201, N803
    """A running sum, as statements of the root block."""
    with T.sblock("root"):
        T.reads()
        T.writes()
        Y[0] = X[0]
        for i in range(T.int64(7)):
            Y[i + 1] = Y[i] + X[i + 1]


def elementwise(function: Any, extent: int = 8) -> Any:
    x = te.placeholder((extent,), "float32", "X")
    return te.create_prim_func([x, te.compute((extent,), lambda i: function(x[i]), name="Y")], index_dtype_override="int64")


def nobodys(x: Any) -> Any:
    """Call what no CPU has."""
    return x + tirx.call_intrin("uint32", "tirx.tvm_warp_activemask").astype("float32")


def tile() -> Any:
    """Return a function that TVM 0.27's LLVM miscompiles for AVX-512."""
    x = te.placeholder((3, 4, 5), "float32", "X")
    return te.create_prim_func([x, topi.tile(x, (6, 4, 2))], index_dtype_override="int64")


@tvm.transform.module_pass(opt_level=0, name="Wrong")
class Wrong:
    """A default schedule that computes something else."""

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        return tvm.IRModule({var: elementwise(tirx.sqrt).with_attr("global_symbol", var.name_hint) for var in mod.functions})


def compiled(passes: DefaultSchedules, target: tvm.target.Target, **functions: Any) -> dict[str, Any]:
    with target:
        passes(tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in functions.items()}))
    return dict(passes.compiled)


def gpu_passes() -> list[Any]:
    passes = relax.pipeline.legalize_passes(H200)
    return passes[1 + [each.info.name for each in passes].index("FuseTIR") :]


@pytest.mark.parametrize("func", [row_by_row, without_blocks], ids=["row_by_row", "without_blocks"])
def test_what_tvms_default_schedule_cannot_take_runs_on_a_plain_one(func: Any) -> None:
    with pytest.raises(Exception, match=r"."), H200:
        tvm.tirx.build(tvm.transform.Sequential(gpu_passes())(tvm.IRModule({"f": func.with_attr("global_symbol", "f")})), H200, "s_tir")
    found = compiled(DefaultSchedules(gpu_passes()), H200, f=func, relu=elementwise(lambda x: te.max(x, 0.0)))
    assert {name: each.means for name, each in found.items()} == {"f": "plain", "relu": "default"}
    assert str(found["f"]).startswith("a plain schedule; TVM cannot compile it: ")
    assert "\n" not in str(found["f"])


def rows_minus_sums(x: Any) -> Any:
    return x - x.sum(axis=1, keepdims=True)


@needs_nvcc
@pytest.mark.parametrize(
    ("func", "shape", "expected"), [(row_by_row, (8, 16), rows_minus_sums), (without_blocks, (8,), np.cumsum)], ids=["rows", "running_sum"]
)
def test_a_plain_gpu_kernel_computes_the_function(func: Any, shape: tuple[int, ...], expected: Callable[[Any], Any]) -> None:
    passes = DefaultSchedules(gpu_passes())
    with H200:
        mod = passes(tvm.IRModule({"f": func.with_attr("global_symbol", "f")}))
    assert passes.compiled["f"].means == "plain"
    x = RNG.standard_normal(shape, dtype=np.float32)
    _, got = Kernel(mod["f"])(x, np.full(shape, np.nan, np.float32))
    np.testing.assert_allclose(got, expected(x), rtol=1e-5, atol=1e-5)


def test_a_function_that_nothing_compiles_is_named_in_one_sentence() -> None:
    with pytest.raises(
        ToolchainError, match=r"^odd: TVM cannot compile it: .*; declare an entry for it, or replace the operator$"
    ) as raised:
        compiled(DefaultSchedules([]), HERE, fine=elementwise(tirx.exp), odd=elementwise(nobodys))
    assert "\n" not in str(raised.value)


def test_wrong_code_is_found_and_replaced() -> None:
    found = compiled(DefaultSchedules([Wrong()], verification(HERE)), HERE, f=elementwise(tirx.exp))["f"]
    assert found.means == "plain"
    assert found.reason.startswith("TVM's code for it is wrong: relative error ")
    assert found.verdict.startswith("verified, relative error ")


def test_what_cannot_be_run_here_says_so() -> None:
    there = tvm.target.Target({"kind": "llvm", "mcpu": "alderlake" if HERE.attrs["mcpu"] != "alderlake" else "znver1"})
    assert compiled(DefaultSchedules([], verification(there)), there, f=elementwise(tirx.exp))["f"].verdict.startswith(
        "not verified: it is for "
    )
    found = compiled(DefaultSchedules([], verification(HERE)), HERE, f=elementwise(tirx.exp, te.var("n", "int64")))["f"]
    assert found.verdict.startswith("not verified: parameter X has a dynamic extent")


@pytest.mark.slow
def test_a_verified_tile_is_that_of_numpy() -> None:
    """Candidate and reference are both compiled by an LLVM that miscompiles this: equal garbage would pass."""
    found = compiled(DefaultSchedules([], verification(HERE)), HERE, f=tile())["f"]
    assert found.verdict.startswith("verified")


# In a model


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return an artifact of two kernels, one of them the fallback, and what the build said."""
    space = Space(tmp_path_factory.mktemp("net"))
    head = REAL["workloads.toml"].split("[[workload]]")[0]
    space.write({name: text for name, text in REAL.items() if name != "workloads.toml"})
    said = space.write({"workloads.toml": head + ENTRIES}).run_here("build", "--jobs", "1").stdout
    return space.artifact(), said


def model() -> tvm.IRModule:
    """Return a model of three functions: relu has a kernel, cumsum and tile have none."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 4, 5), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            summed = builder.emit(relax.op.cumsum(builder.emit(relax.op.nn.relu(x)), axis=1))
            tiled = builder.emit_output(relax.op.tile(summed, (6, 4, 2)))
        builder.emit_func_output(tiled)
    return builder.get()


@pytest.mark.slow
def test_the_summary_of_a_build_says_what_runs_on_a_fallback(artifact: tuple[Path, str]) -> None:
    """An elementwise kernel of 60 floats reads and writes 480 bytes, a GEMM of 16 x 16 x 16 moves 3072, three times."""
    operations, moved = 60 / (60 + 3 * 2 * 16**3), 480 / (480 + 9216)
    shares = f"{100 * operations:.2g} % of operations, {100 * moved:.2g} % of bytes"
    assert f"net for host: 1 of 2 entries run on a fallback: {shares} (relu)" in artifact[1].splitlines()


@pytest.mark.parametrize("mode", at({0}, ["schedule", "binary"]))
def test_the_report_says_which_way_each_function_goes(artifact: tuple[Path, str], mode: Any, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    target = target_of(artifact[0])
    passes = pipeline(artifact[0], target, mode)
    executable = relax.build(model(), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    report = passes.report
    assert "kernels for 1 of 4 functions, 1 of them fallbacks" in str(report)
    assert report.on_fallback == ("relu",)
    assert set(report.compiled) == {"cumsum_within", "cumsum_ends", "cumsum_tile"}
    assert all(each.verdict.startswith("verified") for each in report.compiled.values()), report.compiled
    assert not caplog.records, "the report is for the caller to print"
    export_model(executable, tmp_path / "model.so", artifact[0])
    x = RNG.standard_normal((3, 4, 5), dtype=np.float32)
    got = load_model(tmp_path / "model.so")["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(got, np.tile(np.cumsum(np.maximum(x, 0), axis=1), (6, 4, 2)), rtol=1e-4, atol=1e-5)


def test_verification_is_an_option(artifact: tuple[Path, str]) -> None:
    target = target_of(artifact[0])
    passes = pipeline(artifact[0], target, verify=False)
    relax.build(model(), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    assert {each.verdict for each in passes.report.compiled.values()} == {""}
