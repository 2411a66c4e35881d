"""Owns the parameters that CPU policies choose and the templates of the same families read.

Knows nothing of TVM, of how a policy chooses parameters or of how a template applies them.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.model import Candidate


class CpuConvParams(NamedTuple):
    """The parameters of `cpu_conv2d`: a direct convolution in register tiles of output pixels by output channels."""

    tile_w: int
    """Neighbouring output pixels of a register tile."""
    tile_f: int
    """Output channels of a register tile."""
    block_h: int
    """Output rows of a task."""
    block_f: int
    """Output channels of a task."""
    pack_f: bool
    """Whether weights are packed into panels of `tile_f` channels."""
    order: str
    """A task's inner loop: "wf" its panels of channels, for each register tile of pixels; "fw" its pixels, for each panel."""
    pad_at: str
    """Where the image is padded: "task" in each task, "root" once before all."""

    def candidate(self) -> Candidate:
        return Candidate.of("cpu_conv2d", self._asdict())
