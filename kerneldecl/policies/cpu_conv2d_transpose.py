"""Owns which register tiles and tasks of a transposed convolution a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

from kerneldecl.model import Arch, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.cpu import time_model as model
from kerneldecl.policies.cpu.phased_conv import PhasedConv, choices, estimate, points_of
from kerneldecl.policies.shared.transposed_conv import transposed_of

TEMPLATES = ("cpu_conv2d_transpose",)
AUTO = {"cpu": 22}
HAS_TRACES = False


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no transposed convolution."""
    conv = _phased(space)
    if conv is None:
        return ()
    return model.ranked(estimate(TEMPLATES[0], conv, params, arch.the_cpu) for params in choices(conv, arch.the_cpu))[:top_k]


def _phased(space: IterSpace) -> PhasedConv | None:
    """Return the transposed convolution that a function is; None for any other."""
    found = transposed_of(space)
    if found is None:
        return None
    block, filters = found.block, found.filters
    pixels, weights = block.reads
    dtype = block.writes[0].dtype
    copied = pixels.operand not in space.inputs or pixels.dtype != dtype
    return PhasedConv(
        images=found.images,
        rows=found.rows,
        columns=found.columns,
        stride=found.stride,
        f=found.f,
        taps=points_of(filters) // (found.channels * found.f),
        channels=found.channels,
        dtype=dtype,
        image_bytes=points_of(pixels) * dtype_bytes(dtype) if copied else 0,
        has_panels=filters.shape[2:] != weights.shape[2:] or filters.dtype != dtype,
    )
