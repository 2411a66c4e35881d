"""The repository's own workloads.toml: it holds the published comparison's operators, and can be planned as it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.repository import REPOSITORY

from kerneldecl.declare.document import declare
from kerneldecl.declare.select import select
from kerneldecl.planning.workspace import open_workspace
from kerneldecl.stages.session import make_plan

ROOT = REPOSITORY

PUBLISHED = """
elementwise_copy 128-8192-float16
elementwise_copy 16384-16384-float16
elementwise_add 16384-16384-float16
reduce_sum 16384-1024-float16
reduce_max 16384-1024-float16
softmax 128-10-float16
matmul_nt 1024-1024-1024-float16
matmul_nt 8192-8192-8192-float16
matmul_nt 16384-16384-16384-float16
matmul_nn 1024-1024-1024-float16
matmul_nn 8192-8192-8192-float16
matmul_nn 16384-16384-16384-float16
matmul_nt 1024-1024-1024-float32
matmul_nt 8192-8192-8192-float32
matmul_nn 1024-1024-1024-float32
matmul_nn 8192-8192-8192-float32
conv2d 128-64-224-224-3-7-7-2-1-3-float16
conv2d 128-64-224-224-64-1-1-2-1-3-float16
conv2d 128-64-224-224-3-7-7-2-1-3-float32
gemv 1-1024-1024-float16
gemv 1-8192-8192-float16
gemv 1-16384-16384-float16
gemv_i4 1-16384-16384-float16
"""
"""Operator and arguments of each row; those of conv2d are n, f, h, w, c, kh, kw, stride, dilation, padding."""

SIZES = {
    "matmul": ("m", "n", "k"),
    "conv2d": ("n", "f", "h", "w", "c", "kh", "kw", "stride", "dilation", "padding"),
    "gemv": ("n", "k"),
    "gemv_i4": ("n", "k"),
}


def published_row(rule: str, attrs: Mapping[str, Any]) -> str:
    """Return an entry as the comparison writes it."""
    suffix = f"_{attrs['layout']}" if rule == "matmul" else f"_{attrs['op']}" if rule in {"elementwise", "reduce"} else ""
    sizes = [attrs[name] for name in SIZES[rule]] if rule in SIZES else list(attrs["shape"])
    return f"{rule}{suffix} " + "-".join(map(str, [*([1] if rule.startswith("gemv") else []), *sizes, attrs["dtype"]]))


def test_the_published_comparison_is_declared_in_its_sizes() -> None:
    chosen = select(declare(ROOT).workloads, ["tag:published@h200"])
    assert sorted(published_row(each.rule, dict(each.attrs)) for each in chosen) == sorted(PUBLISHED.split("\n")[1:-1])


def test_products_keep_their_sums_in_float32_unless_the_name_says_otherwise() -> None:
    for each in select(declare(ROOT).workloads, ["rule:matmul@h200"]):
        assert (dict(each.attrs)["accum_dtype"] == "float16") == each.name.startswith("matmul_float16_accum"), each.name


def test_every_entry_has_a_place_in_the_plan() -> None:
    workspace = open_workspace(ROOT)
    plan = make_plan(workspace)
    assert [entry.workload for entry in plan.entries] == list(workspace.declaration.workloads)
    assert {link.target for link in plan.links} == {"host", "h200"}
    assert all(entry.arch.model == "NVIDIA H200" for entry in plan.entries if entry.workload.target == "h200")
