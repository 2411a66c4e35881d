"""Owns `auto` for kernels that all have a trace: what TVM's database is to hold, and every compiler for the arch can compile.

Knows nothing of how policies choose. Left out are those whose kernels may be specialised functions.
"""

from __future__ import annotations

from kerneldecl.policies import auto

_CUDA = tuple(name for name in auto.BY_KIND["cuda"] if name not in {"gpu_matmul", "gpu_gemv", "gpu_gemv_i4"})
BY_KIND = {"cpu": auto.BY_KIND["cpu"], "cuda": ("gpu_gemv", *_CUDA)}  # what is one vector's product is not for tensor cores
