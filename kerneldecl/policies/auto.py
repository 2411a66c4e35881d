"""Owns which policies `auto` stands for: by kind of arch, in the order in which they are asked.

Knows nothing of how they choose. A policy that proposes nothing, or nothing that passes verification, leaves the
workload to the next.
"""

from __future__ import annotations

BY_KIND = {
    "cpu": ("cpu_matmul", "cpu_conv2d", "cpu_gemv", "cpu_rowwise", "cpu_reduce", "cpu_elementwise", "cpu_fallback"),
    "cuda": (
        "gpu_matmul",
        "gpu_matmul_tc",  # where none of the few that were asked for is right
        "gpu_gemv_i4",
        "gpu_gemv",
        "gpu_matmul_simt",
        "gpu_rowwise",
        "gpu_window",
        "gpu_reduce",
        "gpu_elementwise",
        "gpu_fallback",
    ),
}
