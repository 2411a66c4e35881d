"""Owns the tests of artifacts' databases: stock TVM opens them and applies them to Relax modules of the same operators.

Knows nothing of how a database is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from spaces import Space
from tvm import relax
from tvm.s_tir.meta_schedule.database import JSONDatabase
from tvm.script import ir as I  # noqa: N812
from tvm.script import relax as R  # noqa: N812

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


def test_the_database_holds_the_times_of_the_winners(built_real: Space) -> None:
    secs = {float(value) for record in database_of(built_real).get_all_tuning_records() for value in record.run_secs}
    manifest = json.loads((built_real.artifact() / "manifest.json").read_text())
    assert secs == {entry["run_secs"] for entry in manifest["entries"]}
