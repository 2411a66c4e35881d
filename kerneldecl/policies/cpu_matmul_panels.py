"""Owns which GEMMs a CPU should compute by panels that overlap at the ends, which register tiles and panels to try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

from kerneldecl.analysis.cpu_features import has_bfloat16_dots
from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies import cpu_matmul
from kerneldecl.policies.cpu import time_model as model
from kerneldecl.policies.cpu.panel_gemm import PanelGemm, choices, estimate
from kerneldecl.policies.cpu_matmul_quantized import in_panels, quantized_of

TEMPLATES = ("cpu_matmul_panels", "cpu_matmul", "cpu_dot")
AUTO = {"cpu": 9}
HAS_TRACES = False

FLOATS = frozenset({"float32", "float16", "bfloat16"})
LEAST_ROWS = 2
"""Rows and columns of C at least: with one row, each weight is used once, and panels take longer to write than to use."""
LEAST_FMAS = 1 << 24
"""Fused multiply-adds of a GEMM of whole vectors at least: a smaller one takes under a millisecond either way, and `cpu_matmul` leaves a
trace, which other tuners go on from."""

CLOSE = 1.15
"""Predicted times of panels by those of `cpu_matmul` up to which both are raced: neither model is surer."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return panels and tilings of `cpu_matmul` with the least predicted time, best first; nothing where panels are expected to lose."""
    gemm = panel_gemm_of(space, arch)
    if gemm is None or min(gemm.m, gemm.n) < LEAST_ROWS or not _is_worth_it(gemm, arch):
        return ()
    panels = model.ranked(estimate(gemm, params, arch.the_cpu) for params in choices(gemm, arch.the_cpu))
    tilings = () if gemm.pairs else cpu_matmul.propose(space, arch, top_k)
    if not panels or (tilings and panels[0].predicted_secs > CLOSE * tilings[0].predicted_secs):
        return ()
    half = -(-top_k // 2) if tilings else top_k
    return tuple(sorted((*panels[:half], *tilings[:half]), key=lambda each: each.predicted_secs)[:top_k])


def _is_worth_it(gemm: PanelGemm, arch: Arch) -> bool:
    lanes = model.compute_lanes(arch.the_cpu, "float32")
    return gemm.pairs or gemm.n % lanes > 0 or gemm.batch * gemm.m * gemm.n * gemm.k >= LEAST_FMAS


def panel_gemm_of(space: IterSpace, arch: Arch) -> PanelGemm | None:
    """Return the GEMM of arguments, with sums in float32, that a function is, or in pairs with weights that it dequantises; else None."""
    block, gemm = model.two_operand_reduction(space), cpu_matmul.gemm_of(space)
    if block is None or gemm is None or gemm.out_dtype != "float32" or not {read.dtype for read in block.reads} <= FLOATS:
        return None
    has_vectors = gemm.n >= model.compute_lanes(arch.the_cpu, "float32")
    pairs = has_vectors and has_bfloat16_dots(arch) and {read.dtype for read in block.reads} == {"bfloat16"}
    if any(gemm.computed):
        quantized = quantized_of(space) if pairs and gemm.computed == (False, True) else None
        return in_panels(quantized) if quantized is not None and quantized.bf16_group else None
    return PanelGemm(
        batch=gemm.batch,
        m=gemm.m,
        n=gemm.n,
        k=gemm.k,
        a_bytes=gemm.a_bytes,
        weight_bytes=gemm.batch * gemm.n * gemm.k * gemm.b_bytes,
        is_a_row_major=gemm.is_a_row_major,
        is_b_row_major=gemm.is_b_row_major,
        pairs=pairs,
    )
