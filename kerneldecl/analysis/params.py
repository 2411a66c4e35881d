"""Owns the parameters that policies choose and the templates of the same families read, with the layouts that both must know.

Knows nothing of TVM, of how a policy chooses parameters or of how a template applies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from kerneldecl.analysis.hopper_limits import MIN_STAGES, MMA_TILE_ROWS, WARPGROUP_THREADS
from kerneldecl.model import Candidate, Value

SIMT_WARP_ROWS, SIMT_WARP_COLUMNS = 4, 8
"""Lanes of a warp along the rows and the columns of a tile on CUDA cores; in a convolution, along pixels and channels."""
SIMT_VECTOR = 4
"""Neighbouring rows or columns of a thread's tile on CUDA cores: those of one access to shared memory."""
PERMUTED_ROWS = (32, 64, 128, 256)
"""Lengths, in 16-bit elements, of the rows in shared memory that are permuted against bank conflicts; other rows are padded."""
ROW_MULTIPLE = 32
"""Elements that padded rows in shared memory are a multiple of, apart from `row_padding`."""
CONV_TC_MAX_K_TILES = 16
"""K-tiles of 16 elements of `ConvTcParams`'s template at most: it unrolls all of them."""
I4_STEP, I4_STEP_BYTES = 1024, 512
"""4-bit weights of one row that a warp copies and multiplies together, and their bytes: 16 per lane."""
I4_ROWS = (2, 4, 8)
"""Rows whose weights a warp copies and multiplies together."""
I4_GROUPS = (128, 256, 512, 1024)
"""4-bit weights that share a scale: at least as many as the four lanes hold whose weights a tensor core accumulates."""


def row_padding(item_bytes: int) -> int:
    """Return the elements that pad a row of a tile in shared memory: 16 bytes for ldmatrix, which reads so much of each of eight rows.

    Elements of 8 bytes are read one by one, four neighbours in each of four rows at once.
    """
    return (32 if item_bytes == 8 else 16) // item_bytes


class GemmTcParams(NamedTuple):
    """The parameters of `gpu_matmul_tc`: a GEMM tile per thread block, on tensor cores by mma.sync."""

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int
    """K-tiles of both operands in shared memory at once; 1 copies and computes in turn."""
    raster_group: int = 1
    """Rows of tiles that are computed before the next column of tiles."""
    smem_epilogue: int = 0
    """1 stores results through shared memory, in whole rows; 0 has each lane store its own."""
    split_k: int = 1
    double_buffer: int = 0
    """1 loads the next fragments into registers while the current ones are multiplied."""

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_tile(self) -> tuple[int, int]:
        """Return the rows and columns of the result that one warp computes."""
        return self.block_m // self.warps_m, self.block_n // self.warps_n

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_matmul_tc", self._asdict())


class GemmSimtParams(NamedTuple):
    """The parameters of `gpu_matmul_simt`: a GEMM tile per thread block, on CUDA cores."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    stages: int
    """1 copies and computes in turn; 2 holds the next k-tiles in registers while it computes; more are copied by cp.async, so many of
    them in shared memory at once."""
    raster_group: int = 1
    """Rows of tiles that are computed before the next column of tiles."""
    split_k: int = 1
    vector_n: int = SIMT_VECTOR
    """Neighbouring columns of a thread; other lanes' lie between them and its next ones. Candidates without it have `SIMT_VECTOR`."""

    @property
    def threads(self) -> int:
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)

    def candidate(self) -> Candidate:
        left_out = {"vector_n"} if self.vector_n == SIMT_VECTOR else set()
        return Candidate.of("gpu_matmul_simt", {name: value for name, value in self._asdict().items() if name not in left_out})


class ConvTcParams(NamedTuple):
    """The parameters of `gpu_conv2d_tc`: a rectangle of output pixels per thread block, its receptive field in shared memory."""

    rows: int
    columns: int
    block_n: int
    """Output channels of a thread block."""
    warps_rows: int
    warps_columns: int
    warps_n: int
    smem_epilogue: int
    """1 stores results through shared memory, in whole rows; 0 has each lane store its own."""

    @property
    def warps(self) -> int:
        return self.warps_rows * self.warps_columns * self.warps_n

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_conv2d_tc", self._asdict())


class ConvSimtParams(NamedTuple):
    """The parameters of `gpu_conv2d_simt`: rectangles of output pixels per thread block, their receptive fields in shared memory."""

    rows: int
    columns: int
    row_tiles: int
    """Rectangles below one another that a thread block computes in turn; the next receptive field is copied meanwhile."""
    block_n: int
    """Output channels of a thread block."""
    thread_m: int
    """Neighbouring output pixels of a thread."""
    thread_n: int
    """Output channels of a thread."""

    @property
    def groups(self) -> int:
        """Return the runs of `thread_m` pixels in a rectangle."""
        return self.rows * self.columns // self.thread_m

    @property
    def threads(self) -> int:
        return self.groups * self.block_n // self.thread_n

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_conv2d_simt", self._asdict())


GEMM_ALONE = ("pack", "stream_k")
"""Parameters of `WgmmaParams` that `wgmma_matmul` has and `wgmma_conv2d` lacks; candidates of the latter name `pack` where it is 1."""
CONV_ALONE = ("tile_w", "tile_h")
"""Parameters of `WgmmaParams` that `wgmma_conv2d` has and `wgmma_matmul` lacks."""


class WgmmaParams(NamedTuple):
    """The parameters of `wgmma_matmul` and of `wgmma_conv2d`, which are two uses of one GEMM kernel on wgmma."""

    block_m: int
    block_n: int
    consumers: int
    stages: int = MIN_STAGES
    cluster_m: int = 1
    cluster_n: int = 1
    raster_group: int = 1
    split_k: int = 1
    kernel_schedule: str = "cooperative"
    swap_ab: int = 0
    pdl: int = 0
    pack: int = 0
    stream_k: int = 0
    tile_w: int = 0
    """Columns of a tile's box of pixels."""
    tile_h: int = 0
    """Rows of that box."""
    workspace: int = 0
    """1 where split-K adds partial accumulators by a second kernel, out of global memory. Candidates without it do not name it."""

    @property
    def is_cooperative(self) -> bool:
        return self.kernel_schedule == "cooperative"

    @property
    def is_pingpong(self) -> bool:
        return self.kernel_schedule == "pingpong"

    @property
    def is_staggered(self) -> bool:
        return self.kernel_schedule == "staggered"

    @property
    def consumer_rows(self) -> int:
        return self.block_m if self.is_pingpong else self.block_m // self.consumers

    @property
    def thread_accumulators(self) -> int:
        return self.consumer_rows * self.block_n // WARPGROUP_THREADS

    def candidate_of(self, template: str, own: Sequence[str]) -> Candidate:
        """Return the candidate of a template that has `own` parameters besides those of both."""
        left_out = {*GEMM_ALONE, *CONV_ALONE, *(() if self.workspace else ("workspace",))} - {*own}
        return Candidate.of(template, {name: value for name, value in self._asdict().items() if name not in left_out})


class WindowParams(NamedTuple):
    """The parameters of `wgmma_window`: boxes of output pixels whose receptive fields are in shared memory, multiplied by wgmma."""

    tile_w: int
    mma_tiles: int
    """64-row MMA tiles of a box."""
    block_n: int
    stages: int
    blocks: int
    """CTAs on an SM."""

    @property
    def tile_h(self) -> int:
        return self.mma_tiles * MMA_TILE_ROWS // self.tile_w

    def candidate(self) -> Candidate:
        return Candidate.of("wgmma_window", self._asdict())


class GemvI4Params(NamedTuple):
    """The parameters of `gpu_gemv_i4`: warps that stream rows of 4-bit weights through shared memory."""

    rows: int
    """Rows that a warp computes together."""
    warps: int
    """Warps of a thread block."""
    stages: int
    """Pieces of `rows` x `I4_STEP` weights that a warp has in shared memory or on their way to it."""
    blocks: int
    """Thread blocks that share an SM."""
    warps_k: int
    """Warps that share rows, each with some of their k."""

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_gemv_i4", self._asdict())


class Params(Protocol):
    """Parameters of a template, which become a candidate only where they are proposed: most of a search space is not."""

    def candidate(self) -> Candidate: ...


_ParamsT = TypeVar("_ParamsT", GemmTcParams, GemmSimtParams, ConvTcParams, ConvSimtParams, WindowParams, GemvI4Params)


def read_params(kind: type[_ParamsT], params: Mapping[str, Value]) -> _ParamsT:
    """Return a candidate's parameters as a family's type; raise TypeError where one without a default is missing."""
    return kind(**{name: value for name, value in params.items() if name in kind._fields})  # type: ignore[arg-type]
