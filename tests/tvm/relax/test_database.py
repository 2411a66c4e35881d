"""Owns the tests of artifacts' databases: stock TVM opens them and applies them to Relax modules of the same operators.

Knows nothing of how a database is written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.compilers import needs_nvcc
from support.spaces import Space
from tvm import relax
from tvm.s_tir.meta_schedule.database import JSONDatabase
from tvm.script import ir as I  # noqa: N812
from tvm.script import relax as R  # noqa: N812

from kerneldecl.relax.prebuilt import read_prebuilt, register_intrinsics
from kerneldecl.relax.prebuilt import target_of as target_of_artifact

RNG = np.random.default_rng(11)


@I.ir_module
class Relu:
    @R.function
    def main(x: R.Tensor((24, 32), "float32")):  # noqa: ANN201, N805
        with R.dataflow():
            y = R.nn.relu(x)
            R.output(y)
        return y


@I.ir_module
class Add:
    @R.function
    def main(x: R.Tensor((24, 32), "float32"), z: R.Tensor((24, 32), "float32")):  # noqa: ANN201, N805
        with R.dataflow():
            y = R.add(x, z)
            R.output(y)
        return y


@I.ir_module
class Matmul:
    @R.function
    def main(a: R.Tensor((16, 32), "float32"), b: R.Tensor((32, 24), "float32")):  # noqa: ANN201, N805
        with R.dataflow():
            c = R.matmul(a, b)
            R.output(c)
        return c


LEGALIZED = [relax.transform.LegalizeOps()]
FUSED = [*LEGALIZED, relax.transform.AnnotateTIROpPattern(), relax.transform.FuseOps(), relax.transform.FuseTIR()]
OPERATORS: dict[str, tuple[Any, list[tuple[int, ...]], Callable[..., Any]]] = {
    "relu": (Relu, [(24, 32)], lambda x: np.maximum(x, 0)),
    "add": (Add, [(24, 32), (24, 32)], np.add),
    "gemm": (Matmul, [(16, 32), (32, 24)], np.matmul),
}


def database_of(space: Space) -> JSONDatabase:
    return JSONDatabase(work_dir=str(space.artifact() / "database"))


def target_of(space: Space) -> tvm.target.Target:
    first = (space.artifact() / "database" / "database_tuning_record.json").read_text().splitlines()[0]
    return tvm.target.Target(json.loads(first)[1][2])


@pytest.mark.parametrize("passes", [LEGALIZED, FUSED], ids=["legalized", "fused"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_stock_tvm_applies_the_database(built_real: Space, operator: str, passes: list[Any]) -> None:
    module, shapes, reference = OPERATORS[operator]
    database, target = database_of(built_real), target_of(built_real)
    with target, database:
        lowered = tvm.transform.Sequential(passes)(module)
        applied = relax.transform.MetaScheduleApplyDatabase(enable_warning=False)(lowered)
    functions = [func for func in applied.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    assert [bool(func.attrs.get("tirx.is_scheduled", False)) for func in functions] == [True]
    machine = relax.VirtualMachine(tvm.compile(applied, target=target), tvm.cpu())
    inputs = [RNG.standard_normal(shape, dtype=np.float32) for shape in shapes]
    got = machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()
    np.testing.assert_allclose(got, reference(*inputs), rtol=1e-4, atol=1e-5)


def test_a_module_of_another_shape_is_left_as_it_is(built_real: Space) -> None:
    @I.ir_module
    class Other:
        @R.function
        def main(x: R.Tensor((24, 33), "float32")):  # noqa: ANN202, N805
            with R.dataflow():
                y = R.nn.relu(x)
                R.output(y)
            return y

    with target_of(built_real), database_of(built_real):
        applied = relax.transform.MetaScheduleApplyDatabase(enable_warning=False)(LEGALIZED[0](Other))
    functions = [func for func in applied.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    assert not any(func.attrs.get("tirx.is_scheduled", False) for func in functions)


STOCK = """
import sys
sys.modules["kerneldecl"] = None  # makes its import fail
sys.modules["torch"] = None  # which tvm_ffi imports where it is installed: it takes seconds
import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase

database = JSONDatabase(work_dir=sys.argv[1])
for record in database.get_all_tuning_records():
    schedule = tvm.s_tir.Schedule(record.workload.mod)
    record.trace.apply_to_schedule(schedule, remove_postproc=False)
    found = database.query_tuning_record(record.workload.mod, record.target, "main")
    print(len(schedule.trace.insts) > 0, record.run_secs is not None, found is not None)
"""
TENSOR_CORES = """\
edition = 1

[artifact]
name = "mini"
version = "0.1.0"

[target.gpu]
arch = "h200"

[defaults]
top_k = 1

[[workload]]
name = "add"
rule = "elementwise"
op = "add"
shape = [64, 64]

[[workload]]
name = "gemm"
rule = "matmul"
policy = "gpu_matmul_tc"
m = 128
n = 128
k = 128
dtype = "float16"
"""


def read_by_tvm_alone(folder: Path) -> list[str]:
    """Return a line for each record: whether its trace applies, whether it has times, whether TVM's lookup finds it."""
    done = subprocess.run([sys.executable, "-c", STOCK, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_stock_tvm_opens_the_database_and_applies_every_record(built_real: Space) -> None:
    manifest = json.loads((built_real.artifact() / "manifest.json").read_text())
    assert read_by_tvm_alone(built_real.artifact() / "database") == ["True True True"] * 2 * len(manifest["entries"])
    assert not (built_real.artifact() / "database_intrinsics").exists()


@pytest.mark.slow
@needs_nvcc
def test_schedules_that_name_intrinsics_stand_in_a_second_database(tmp_path: Path) -> None:
    space = Space(tmp_path / "gpu").write({"workloads.toml": TENSOR_CORES})
    space.run("build", "--no-measure")
    folder = space.artifact("gpu")
    assert read_by_tvm_alone(folder / "database") == ["True False False"] * 2, "the addition, which nobody has measured"
    with pytest.raises(AssertionError, match=r"TensorIntrin 'kd\..* is not registered"):
        read_by_tvm_alone(folder / "database_intrinsics")
    register_intrinsics(folder / "database_intrinsics")
    records = JSONDatabase(work_dir=str(folder / "database_intrinsics")).get_all_tuning_records()
    assert [any(step.kind.name == "Tensorize" for step in record.trace.insts) for record in records] == [True] * 2
    assert [record.run_secs for record in records] == [None] * 2
    kernels = read_prebuilt(folder, target_of_artifact(folder)).kernels
    assert sorted(entry for kernel in kernels for entry in kernel.entries) == ["add", "gemm"]
    entries = json.loads((folder / "manifest.json").read_text())["entries"]
    assert all(entry["run_secs"] is None and entry["predicted_secs"] > 0 for entry in entries)


def test_the_database_holds_the_times_of_the_winners(built_real: Space) -> None:
    secs = {float(value) for record in database_of(built_real).get_all_tuning_records() for value in record.run_secs}
    manifest = json.loads((built_real.artifact() / "manifest.json").read_text())
    assert secs == {entry["run_secs"] for entry in manifest["entries"]}
