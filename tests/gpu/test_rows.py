"""Owns the end-to-end test of rows at run time on a GPU: one symbol, any number of rows, right at each.

Knows nothing of how the kernels are made.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.spaces import Space

import kerneldecl
from kerneldecl.arrays import relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule

pytestmark = pytest.mark.gpu

WORKLOADS = """\
edition = 1

[artifact]
name = "mini"
version = "0.1.0"

[target.gpu]
arch = "h200"

[defaults]
top_k = 2

[[workload]]
name = "gemm"
rule = "matmul"
m = { upto = 700, tuned = [1, 16, 128] }
n = 512
k = 256
layout = "nt"
dtype = "float16"

[[workload]]
name = "norm"
rule = "rms_norm"
shape = [{ upto = 700, tuned = [16] }, 1024]
dtype = "float16"
"""


def test_one_symbol_takes_any_number_of_rows(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    space = Space(tmp_path).write({"workloads.toml": WORKLOADS})
    space.run("build")
    kernels = kerneldecl.load(space.artifact("gpu"))
    rng = np.random.default_rng(1)
    b, gamma = (torch.from_numpy(rng.standard_normal(shape).astype("float16")).cuda() for shape in ((512, 256), (1024,)))
    for rows in (1, 2, 15, 16, 17, 127, 128, 129, 301, 700):
        a = torch.from_numpy(rng.standard_normal((rows, 256)).astype("float16")).cuda()
        torch.testing.assert_close(kernels["gemm"](a, b).float(), a.float() @ b.float().T, rtol=1e-2, atol=5e-2)
        x = torch.from_numpy(rng.standard_normal((rows, 1024)).astype("float16")).cuda().float()
        want = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + kernels["norm"].attrs["eps"]) * gamma.float()
        torch.testing.assert_close(kernels["norm"](x.half(), gamma).float(), want, rtol=1e-2, atol=2e-2)
    with pytest.raises(ValueError, match="A has 701 rows; gemm takes 1 to 700"):
        kernels["gemm"](torch.zeros((701, 256), dtype=torch.float16, device="cuda"), b)


OTHERS = (
    WORKLOADS.partition("[[workload]]")[0]
    + """
[[workload]]
name = "prefill"
rule = "attention"
batch = 1
heads = 4
kv_heads = 2
queries = { upto = 300, tuned = [128] }
keys = 300
head_dim = 64
causal = true

[[workload]]
name = "experts"
rule = "matmul_grouped"
rows = { upto = 700, tuned = [256] }
groups = 3
n = 256
k = 128
dtype = "bfloat16"

[[workload]]
name = "weights"
rule = "matmul_quantized"
m = { upto = 300, tuned = [64] }
n = 256
k = 256
"""
)


def test_attention_grouped_and_quantised_gemm_take_any_number_of_rows(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    space = Space(tmp_path).write({"workloads.toml": OTHERS})
    space.run("build")
    kernels = kerneldecl.load(space.artifact("gpu"))
    for name, attribute in (("prefill", "queries"), ("experts", "rows"), ("weights", "m")):
        kernel = kernels[name]
        for rows in (1, 2, 63, 65, 129, 300):
            rule = load_rule(STANDARD, kernel.rule).of(STANDARD, {**kernel.attrs, attribute: rows})
            given = rule.inputs(np.random.default_rng(rows))
            want = rule.reference(*given)
            shared = [tensor(array) for array in given]
            got = kernel(*(torch.from_dlpack(array).cuda() for array in shared)).float().cpu().numpy()
            assert relative_error(got, np.asarray(want)) <= 2 * rule.tolerance(), f"{name}, {rows} rows"
