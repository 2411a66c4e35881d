"""Owns the tests of functions without a kernel on a GPU: what TVM compiles for it is run there and compared.

Knows nothing of schedules.
"""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax, te, tirx

from kerneldecl.compiler.nvcc_callback import compile_device_code
from kerneldecl.hardware.cuda_driver import read_gpus
from kerneldecl.relax import DefaultSchedules
from kerneldecl.relax.verification import verification

pytestmark = pytest.mark.gpu


def exponential(function: Any = tirx.exp) -> Any:
    x = te.placeholder((1000,), "float32", "X")
    func = te.create_prim_func([x, te.compute((1000,), lambda i: function(x[i]), name="Y")], index_dtype_override="int64")
    return func.with_attr("global_symbol", "f")


@tvm.transform.module_pass(opt_level=0, name="Wrong")
class Wrong:
    """A default schedule that computes something else."""

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        del mod
        return tvm.IRModule({"f": exponential(tirx.sqrt)})


@pytest.mark.parametrize(("is_wrong", "means"), [(False, "default"), (True, "plain")])
def test_what_tvm_compiles_is_verified_on_the_gpu(means: str, *, is_wrong: bool) -> None:
    gpu = read_gpus()[0]
    arch = f"sm_{gpu.compute_capability_major}{gpu.compute_capability_minor}"
    target = tvm.target.Target({"kind": "cuda", "arch": arch, "max_num_threads": 1024, "max_shared_memory_per_block": 49152})
    compile_device_code(target)
    default = relax.pipeline.legalize_passes(target)
    default = default[1 + [each.info.name for each in default].index("FuseTIR") :]
    passes = DefaultSchedules([Wrong(), *default] if is_wrong else default, verification(target))
    with target:
        passes(tvm.IRModule({"f": exponential()}))
    assert passes.compiled["f"].means == means
    assert passes.compiled["f"].verdict.startswith("verified, relative error ")
