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


class CpuPhasedConvParams(NamedTuple):
    """The parameters of `cpu_conv2d_transpose` and `cpu_conv_packed`: rows of one phase in register tiles of pixels by output channels."""

    tile_w: int
    """Results of a register tile, neighbours of one phase in a row."""
    vectors: int
    """Vectors of output channels of a register tile, and of a panel."""
    block_h: int
    """Rows of one phase of a task."""
    panels: int
    """Panels of output channels of a task."""
    pack: bool
    """Whether the weights are copied into panels first."""

    def fits(self) -> bool:
        """Say whether a kernel can be built."""
        return 1 <= self.tile_w <= 16 and 1 <= self.vectors <= 6 and self.block_h >= 1 and self.panels >= 1


class CpuQuantizedParams(NamedTuple):
    """The parameters of `cpu_matmul_quantized`: register tiles of dot products along k."""

    rows: int
    """Rows of W of a register tile."""
    tile_m: int
    """Rows of A of a register tile."""

    def fits(self) -> bool:
        """Say whether a kernel can be built."""
        return 1 <= self.rows <= 8 and 1 <= self.tile_m <= 16

    def candidate(self) -> Candidate:
        return Candidate.of("cpu_matmul_quantized", self._asdict())


SERIAL_FMAS = 1 << 17
"""Fused multiply-adds of a GEMM by panels up to which one core computes it, in microseconds: starting threads takes as long."""
SERIAL_ELEMENTS = 1 << 15
"""Elements of A up to which one core copies it for panels."""


class CpuPanelParams(NamedTuple):
    """The parameters of `cpu_matmul_panels`: register tiles of rows by vectors of columns, and blocks that stay in caches."""

    tile_m: int
    """Rows of A of a register tile."""
    vectors: int
    """Vectors of columns of a register tile, and of a panel of B."""
    block_k: int
    """Elements along k of a panel of B: whole steps of 32."""
    block_m: int
    """Rows of A of a task."""

    def fits(self) -> bool:
        """Say whether a kernel can be built."""
        return 1 <= self.tile_m <= 16 and 1 <= self.vectors <= 4 and self.block_k >= 1 and self.block_m >= 1

    def candidate(self) -> Candidate:
        return Candidate.of("cpu_matmul_panels", self._asdict())


class CpuInt8Params(NamedTuple):
    """The parameters of `cpu_matmul_int8`: register tiles of dot products along k, and their instruction."""

    tile_m: int
    """Rows of A of a register tile."""
    tile_n: int
    """Rows of W of a register tile."""
    dot: str
    """Instruction: vnni or pairs, as `cpu_features.byte_dots` returns them."""

    def fits(self) -> bool:
        """Say whether a kernel can be built."""
        return 1 <= self.tile_m <= 16 and 1 <= self.tile_n <= 8

    def candidate(self) -> Candidate:
        return Candidate.of("cpu_matmul_int8", self._asdict())


class CpuAttentionParams(NamedTuple):
    """The parameters of `cpu_attention`: blocks of queries by blocks of keys, with queries in vectors."""

    block_m: int
    """Queries of a task, whole vectors of them."""
    block_n: int
    """Keys whose scores are computed before their values are weighted; a multiple of `tile_n`."""
    tile_n: int
    """Keys of a register tile of scores."""
    tile_e: int
    """Elements of values of a register tile of results."""
    pack: bool
    """Whether keys and values are copied to float32, row behind row, before all tasks."""

    def fits(self, lanes: int) -> bool:
        """Say whether a kernel with vectors of so many float32 can be built."""
        sizes = self.block_m >= lanes and self.tile_n >= 1 and self.tile_e >= 1 and self.block_n >= self.tile_n
        return sizes and self.block_m % lanes == 0 and self.block_n % self.tile_n == 0

    def candidate(self) -> Candidate:
        return Candidate.of("cpu_attention", self._asdict())


class CpuDecodeParams(NamedTuple):
    """The parameters of `cpu_attention_decode`: rows of queries that see the same head of keys, and register tiles of scores."""

    rows: int
    """Rows of queries of a task: a divisor of those that see the same head of keys."""
    tile_m: int
    """Rows of a register tile: a divisor of `rows`."""
    tile_n: int
    """Keys of a register tile of scores."""

    def fits(self) -> bool:
        """Say whether a kernel can be built."""
        return self.rows >= 1 and 1 <= self.tile_m <= 8 and 1 <= self.tile_n <= 8

    def candidate(self) -> Candidate:
        return Candidate.of("cpu_attention_decode", self._asdict())


class CpuGroupNormParams(NamedTuple):
    """The parameters of `cpu_group_norm`."""

    vectors: int
    """Vectors of elements, and of their squares, that a task adds up side by side."""
    block: int
    """Pixels of a task where channels are last."""
    parallel: bool
    """Whether tasks run on all cores."""

    def candidate(self) -> Candidate:
        return Candidate.of("cpu_group_norm", self._asdict())


class CpuRowsParams(NamedTuple):
    """The parameters of `cpu_scan`, `cpu_topk` and `cpu_scatter_add`."""

    parallel: bool
    """Whether tasks run on all cores."""
