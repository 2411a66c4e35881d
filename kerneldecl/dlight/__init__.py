"""The interface of "fast dlight" over kerneldecl's core: hardware-aware schedules of TensorIR functions, in Python, without a workspace.

arch = CUDA("h200")
func, tags = get_tensorized_func_and_tags(func, arch.target)
policy = TensorCorePolicy(func=func, arch=arch, tags=tags) if tags else DefaultPolicy(func=func, arch=arch)
results, best = apply_and_build(func, policy.emit_config(20), arch, parallel_build=True)
"""

from __future__ import annotations

from kerneldecl.dlight.building import Result, apply_and_build, workers
from kerneldecl.dlight.device import CUDA
from kerneldecl.dlight.passes import ApplyFastTuning, apply_opt_before_tuning
from kerneldecl.dlight.policy import Config, DefaultPolicy, TensorCorePolicy
from kerneldecl.dlight.tensorize import get_tensorized_func_and_tags, why_no_tensor_cores
from kerneldecl.relax.prebuilt import register_intrinsics

__all__ = [
    "CUDA",
    "ApplyFastTuning",
    "Config",
    "DefaultPolicy",
    "Result",
    "TensorCorePolicy",
    "apply_and_build",
    "apply_opt_before_tuning",
    "get_tensorized_func_and_tags",
    "register_intrinsics",
    "why_no_tensor_cores",
    "workers",
]
