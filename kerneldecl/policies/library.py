"""Owns the policy `library`: GEMMs by OpenBLAS or cuBLASLt, convolutions and attention by cuDNN, as candidates beside our own kernels.

Knows nothing of how a library is called. A library that is not there, or of another version, fails as a candidate, and says what to
install.

    policy = ["auto", "library"]                          # the fastest; dispatch = "fastest" says the same
    policy = { name = "library", cublas = "13.1.0" }
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kerneldecl.analysis.attention import AttentionSizes, attention_of, library_takes
from kerneldecl.analysis.contraction import Contraction, contraction_of
from kerneldecl.model import Arch, Candidate, IterSpace, Proposal
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.policies.shared.traffic import moved_bytes

IS_TUNER = True
TRIALS = 0
TEMPLATES = ("library_matmul", "library_conv2d", "library_attention")
KINDS = ("cpu", "cuda")
ALGORITHMS = 8
"""How many of the algorithms that the heuristic of cuBLASLt or cuDNN returns are tried."""
ATTENTION_ENGINES = 2
"""The same for attention, of which cuDNN has few."""
_VERSION = re.compile(r"\d+(\.\d+){0,2}")


@dataclass(frozen=True)
class Options:
    """Versions of the libraries, with one to three numbers: 13.1 takes every 13.1."""

    openblas: str = "0.3.34"
    """As `scipy-openblas32` numbers its releases."""
    cublas: str = "13.1"
    """As `nvidia-cublas` numbers its releases."""
    cudnn: str = "9.19"
    """As `nvidia-cudnn-cu13` numbers its releases."""

    def problems(self) -> Iterator[str]:
        for name, version in vars(self).items():
            if not _VERSION.fullmatch(version):
                yield f'{name} is "{version}"; expected a version such as "{getattr(Options, name)}"'


def configurations(search: SearchSpace, options: Options) -> tuple[Proposal, ...]:
    """Return the calls of a library that can compute the function, expected to take what arithmetic and traffic take at least."""
    attention = attention_of(search.space) if search.arch.gpu else None
    if attention is not None:
        return tuple(_attention(attention, search, options))
    gemm = contraction_of(search.space)
    if not isinstance(gemm, Contraction) or not gemm.is_plain or gemm.a.dtype == "tfloat32":  # libraries round to it, rules truncate
        return ()
    secs = _least_secs(gemm, search.space, search.arch)
    return tuple(Proposal(candidate, secs) for candidate in _candidates(gemm, search.space, search.arch, options))


def _candidates(gemm: Contraction, space: IterSpace, arch: Arch, options: Options) -> Iterator[Candidate]:
    if arch.gpu is None:
        if gemm.a.dtype == gemm.accum_dtype and gemm.accum_dtype in {"float32", "float64"}:
            yield Candidate.of("library_matmul", {"library": "openblas", "version": options.openblas, "algorithm": 0})
        return
    reduction = next(block for block in space.blocks if block.is_reduction)
    if len(gemm.k) > 1:  # a window's rows and columns are reduced as well as its channels
        for engine in range(ALGORITHMS):
            yield Candidate.of("library_conv2d", {"library": "cudnn", "version": options.cudnn, "engine": engine})
    if sum(reduction.axes[axis].extent > 1 for axis in gemm.k) <= 1:
        for algorithm in range(ALGORITHMS):
            yield Candidate.of("library_matmul", {"library": "cublaslt", "version": options.cublas, "algorithm": algorithm})


def _attention(sizes: AttentionSizes, search: SearchSpace, options: Options) -> Iterator[Proposal]:
    if not library_takes(sizes):
        return
    pairs = sizes.batch * sizes.heads * sizes.band.pairs(sizes.queries, sizes.keys)
    device = search.arch.device
    flops = 2 * pairs * (sizes.head_dim + sizes.value_dim)
    secs = max(flops / device.peak_flops_per_s(sizes.dtype), sizes.arguments_bytes / device.dram_bytes_per_s)
    for engine in range(ATTENTION_ENGINES):
        yield Proposal(Candidate.of("library_attention", {"library": "cudnn", "version": options.cudnn, "engine": engine}), secs)


def _least_secs(gemm: Contraction, space: IterSpace, arch: Arch) -> float:
    batch, m, n, k = gemm.extents
    flops = 2 * batch * m * n * k
    return max(flops / arch.device.peak_flops_per_s(gemm.a.dtype), moved_bytes(space) / arch.device.dram_bytes_per_s)
