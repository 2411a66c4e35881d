"""Memory-bound kernels on a real GPU: what policies propose computes the rule's reference and writes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from support.gpu_kernels import Case, Checked, proposed

pytestmark = pytest.mark.gpu

POLICIES = proposed(
    "gpu_gemv_i4", "gpu_gemv_unaligned", "gpu_gemv", "gpu_arg_reduce", "gpu_fused_norm", "gpu_split_rows", "gpu_cross_entropy",
    "gpu_rowwise", "gpu_reduce", "gpu_flat_elementwise", "gpu_gather", "gpu_unaligned_elementwise", "gpu_rotary", "gpu_elementwise",
    "gpu_fallback",
)  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("elementwise", {"op": "silu", "shape": shape, "dtype": "float16"}) for shape in [(1,), (7,), (5, 37), (3, 64, 50), (300, 72)]),
    *(("elementwise", {"op": "add", "shape": (9, 48), "dtype": dtype}) for dtype in ("bfloat16", "float8_e4m3fn", "int8", "float64")),
    *(("elementwise", {"op": "gelu", "shape": (1001, 128), "dtype": dtype}) for dtype in ("float16", "bfloat16", "float32")),
    *(
        ("elementwise", {"op": op, "shape": (1003, 1001), "dtype": d})
        for op in ("add", "silu_mul")
        for d in ("float16", "bfloat16", "float32")
    ),
    *(("expression", {"expr": "x * y + 1", "shapes": ((501, 333), other), "dtype": "float16"}) for other in [(333,), (501, 1), (501, 333)]),
    *(("batch_norm", {"shape": (4, 24, 27, 27), "axis": axis, "dtype": d}) for axis in (1, -1) for d in ("float16", "float32")),
    *(("transpose", {"shape": shape, "axes": (1, 0)}) for shape in [(1, 17), (49, 81), (512, 1024), (96, 40)]),
    *(("transpose", {"shape": (2, 64, 3, 64), "axes": (0, 2, 3, 1), "dtype": dtype}) for dtype in ("bfloat16", "int8")),
    *(("reduce", {"op": "sum", "shape": shape, "axes": axes}) for shape, axes in [((1, 1), (1,)), ((1031,), (0,)), ((3, 65536), (1,))]),
    *(("reduce", {"op": op, "shape": (610, 71), "axes": (axis,), "dtype": "int8"}) for op in ("max", "min") for axis in (0, 1)),
    *(("reduce", {"op": "mean", "shape": (640, 1000), "axes": (axis,), "dtype": d}) for d in ("float16", "bfloat16") for axis in (0, 1)),
    *(("reduce", {"op": "mean", "shape": (6, 7, 10, 50), "axes": axes, "dtype": "float16"}) for axes in [(1, 3), (0, 2), (0, 1, 2, 3)]),
    *(
        ("reduce", {"op": "sum", "shape": shape, "axes": (0,)})
        for shape in [(65536, 8), (300, 1), (4096, 331), (38791, 3), (10007, 521), (191, 27799)]
    ),
    *(("reduce", {"op": op, "shape": (16381, 67), "axes": (1,), "dtype": "float16"}) for op in ("max", "sum")),
    *(("softmax", {"shape": shape, "dtype": "float16"}) for shape in [(128, 10), (9, 67), (64, 1024), (1, 100), (3, 5, 10001)]),
    ("softmax", {"shape": (16334, 5), "dtype": "bfloat16"}),
    *(
        ("softmax", {"shape": shape, "axis": axis})
        for shape, axis in [((4, 5, 33), 1), ((33,), 0), ((5, 1), 1), ((700, 5), 0), ((3, 5000, 2), 1)]
    ),
    *(("softmax", {"shape": shape, "dtype": "float16"}) for shape in [(4, 128256), (16, 32000), (1, 1 << 20), (3, 100001), (2, 8, 5000)]),
    *(("softmax", {"shape": (7, 30000), "dtype": d, "out_dtype": o}) for d, o in [("bfloat16", "float32"), ("float32", "float16")]),
    *(
        (norm, {"shape": (3, columns), "dtype": d})
        for norm in ("layer_norm", "rms_norm")
        for columns in (65536, 70001)
        for d in ("float16", "float32")
    ),
    *(
        (norm, {"shape": shape, "residual": residual, "out_dtype": out, "dtype": d})
        for norm in ("layer_norm", "rms_norm")
        for shape, residual, out, d in [
            ((5, 768), True, "", "float16"),
            ((37, 4096), True, "float8_e4m3fn", "bfloat16"),
            ((3, 9, 333), False, "int8", "float32"),
            ((4, 16000), True, "int8", "float16"),
        ]
    ),
    *(
        ("softmax", {"shape": (3, 4, 65, 200), "scale": 0.3, "mask": mask, "dtype": d})
        for mask, d in [((3, 1, 65, 200), "float16"), ((1, 200), "float32"), ((), "bfloat16")]
    ),
    *(
        ("cross_entropy", {"rows": rows, "classes": c, "dtype": d})
        for rows, c, d in [(33, 1000, "float16"), (9, 32000, "bfloat16"), (5, 128257, "float32")]
    ),
    *(
        ("elementwise", {"op": op, "shape": shape, "halves": True, "dtype": "bfloat16"})
        for op in ("silu_mul", "gelu_mul")
        for shape in [(5, 37), (300, 1408)]
    ),
    *(("rotary", {"batch": 2, "tokens": 33, "heads": 4, "size": 64, "pairs": pairs, "dtype": "float16"}) for pairs in (True, False)),
    *(
        ("rotary", {"batch": 2, "tokens": 33, "heads": heads, "size": 128, "dtype": d, "interleaved": order, "pairs": pairs})
        for heads, d, order, pairs in [(8, "bfloat16", "x", False), (5, "float32", "y", True), (12, "bfloat16", "xy", False)]
    ),
    *(("layer_norm", {"shape": shape}) for shape in [(6, 64), (7, 1001), (2, 3, 45), (40, 4096)]),
    *(("rms_norm", {"shape": (2, 31, 5120), "dtype": dtype}) for dtype in ("float16", "bfloat16")),
    *(("gemv", {"n": n, "k": k, "layout": layout}) for layout in "nt" for n, k in [(1, 300), (33, 45), (130, 1), (64, 5120), (1024, 1000)]),
    *(("gemv", {"n": 160, "k": 1280, "layout": layout, "dtype": dtype}) for layout in "nt" for dtype in ("int8", "float16", "bfloat16")),
    *(("gemv", {"n": 301, "k": k, "layout": layout, "dtype": d}) for layout in "nt" for k in (95, 3001) for d in ("float16", "bfloat16")),
    *(("gemv_i4", {"n": n, "k": k, "group": g, "dtype": "float16"}) for n, k, g in [(1, 32, 16), (33, 96, 6), (512, 4096, 128)]),
    *(("gemv_i4", {"n": n, "k": k, "dtype": "float16"}) for n, k in [(101, 2816), (4096, 11008), (16384, 16384)]),
    *(("gemv_i4", {"n": 40, "k": 1024, "group": group, "dtype": d}) for group in (16, 128) for d in ("bfloat16", "float32")),
    *(("batch_norm", {"shape": (3, 64, 14, 15), "axis": axis, "dtype": "float16", "activation": "relu"}) for axis in (1, -1)),
    *(("embedding", {"indices": (5, 33), "rows": 1001, "columns": c, "dtype": d}) for c in (8, 77, 1024) for d in ("float16", "float32")),
    *(("arg_reduce", {"op": op, "shape": (9, c), "dtype": "float16"}) for op in ("argmax", "argmin") for c in (8, 333, 32000, 128256)),
    *(("arg_reduce", {"op": op, "shape": (1003, 1000), "dtype": "float16"}) for op in ("argmax", "argmin")),
    *(("arg_reduce", {"op": "argmax", "shape": (3, 40, 50), "axis": 1, "dtype": d}) for d in ("bfloat16", "int8", "float32")),
    *(
        ("arg_reduce", {"op": op, "shape": shape, "axis": axis, "dtype": d})
        for op, d in (("argmax", "bfloat16"), ("argmin", "float32"), ("argmin", "int8"))
        for shape, axis in [((8, 49456), 0), ((49457, 8), 0), ((6, 200, 300), 1), ((4001, 7), 0), ((4000, 4, 3), 1), ((1, 32000), 1)]
    ),
    *(
        ("expression", {"expr": "where(x < y, -x / 2, max(x, silu(z)))", "shapes": ((300, 72), (72,), (300, 1)), "dtype": d})
        for d in ("float16", "bfloat16", "float32")
    ),
]


@pytest.mark.parametrize("case", [Case(str(attrs), rule, attrs, POLICIES) for rule, attrs in CASES], ids=str)
def test_proposed_candidates_compute_the_reference(case: Case, check: Checked) -> None:
    check(case)
