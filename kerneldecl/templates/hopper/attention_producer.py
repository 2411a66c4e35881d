"""Owns the tiles of an attention kernel and their order, and the producer thread that loads them.

Knows nothing of consumers but that they give stages back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.backend.cuda.lang.pipeline import PipelineState
from tvm.script import tirx as T

from kerneldecl.analysis.attention import CHUNK, ITEM_BYTES
from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.templates.hopper.attention_config import AttentionKernel
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.tma import LOAD, MULTICAST, PREFETCH


class Smem(NamedTuple):
    """Shared memory of a CTA, and its barriers."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    """One for each consumer's rows in each stage, like `q_empty`."""
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


@T.meta_class
class Tile:
    """The tile of a CTA, given as its cluster and its rank, in one wave: which head, which rows, which blocks of keys they see.

    These are the blocks from `first` on, before `blocks`; there is at least one.
    """

    def __init__(self, kernel: AttentionKernel, cta: tuple[Any, Any], wave: Any) -> None:
        self.kernel = kernel
        self.linear = T.local_scalar("int32")
        self.batch = T.local_scalar("int32")
        self.head = T.local_scalar("int32")
        self.row = T.local_scalar("int32")
        self.first = T.local_scalar("int32")
        self.blocks = T.local_scalar("int32")
        self._place(*cta, wave)

    @T.inline
    def _place(self, cluster, rank, wave):
        kernel, spec, params = T.meta_var((self.kernel, self.kernel.spec, self.kernel.params))
        # Every other wave goes backwards, so that the cluster with the longest tile of one has the shortest of the next.
        self.linear = wave * kernel.clusters + T.Select(wave % 2 == 0, cluster, kernel.clusters - 1 - cluster)
        tile, head = T.meta_var(kernel.place(self.linear, kernel.grid, kernel.heads_together))
        row_rank, head_rank = T.meta_var((0, rank) if kernel.shares_heads else (rank, 0))
        row_step, head_step = T.meta_var((1, params.cluster) if kernel.shares_heads else (params.cluster, 1))
        flat = T.meta_var(head * head_step + head_rank)
        self.head = flat % spec.heads
        self.batch = flat // spec.heads
        self.row = (tile * row_step + row_rank) * params.block_m
        if spec.is_causal:
            last = T.meta_var(T.min(self.row + params.block_m, spec.queries) + spec.diagonal)
            self.blocks = T.max(1, (T.min(last, spec.keys) + params.block_n - 1) // params.block_n)
        else:
            self.blocks = kernel.key_blocks
        if spec.band.lower is None:
            self.first = 0
        else:
            self.first = T.min(T.max(0, self.row + spec.band.lower) // params.block_n, self.blocks - 1)

    def exists(self) -> Any:
        return self.linear < self.kernel.tiles

    def whole_blocks(self, first_row: Any) -> tuple[Any, Any]:
        """Return the first block of keys that all 64 rows from one on see whole, and the one after the last such block."""
        spec, block_n = self.kernel.spec, self.kernel.params.block_n
        lower, upper = spec.band
        whole = spec.keys // block_n
        stop = whole if upper is None else T.min(whole, T.max(0, first_row + upper + 1) // block_n)
        first = 0 if lower is None else (T.max(0, first_row + MMA_TILE_ROWS - 1 + lower) + block_n - 1) // block_n
        return first, stop


@T.inline
def _load_boxes(stage, tensor_map, barrier, at, chunk_elements):
    """Have one thread start the loads of a tile's chunks of so many columns each; `at` is the row, head and batch."""
    buffer, index, count, columns = meta_vars(stage)
    row, head, batch = meta_vars(at)
    for chunk in T.unroll(count):
        T.ptx[LOAD.format(4, "")](
            buffer.ptr_to([index, chunk * chunk_elements]), T.address_of(tensor_map), chunk * columns, row, head, batch, barrier
        )


@T.inline
def _load_rows(kernel, ring, tensor_map, state, at):
    """Have one thread load a block of keys or values, or its CTA's part for the cluster, once its stage is free in all of its CTAs.

    `ring` is the stages, their barriers and chunks; `at` is the row, head and batch, and the CTA's rank.
    """
    buffer, full, empty, count = meta_vars(ring)
    row, head, batch, rank = meta_vars(at)
    elements = T.meta_var(kernel.params.block_n * CHUNK)
    empty.wait(state.stage, state.phase)
    full.arrive(state.stage, count * elements * ITEM_BYTES)
    if kernel.params.cluster == 1:
        _load_boxes(
            (buffer, state.stage, count, kernel.chunk_columns), tensor_map, full.ptr_to([state.stage]), (row, head, batch), elements
        )
    else:
        first = T.meta_var(rank * kernel.box_rows)
        for chunk in T.unroll(count):
            T.ptx[LOAD.format(4, MULTICAST)](
                buffer.ptr_to([state.stage, chunk * elements + first * CHUNK]),
                T.address_of(tensor_map),
                chunk * CHUNK,
                row + first,
                head,
                batch,
                full.ptr_to([state.stage]),
                T.uint16((1 << kernel.params.cluster) - 1),
            )
    state.advance()


@T.inline
def _load_transposed(kernel, smem, tensor_map, state, at):
    """Have one thread load a block of values that are transposed: its columns, and keys up to a whole chunk; `at` is as in _load_rows."""
    row, head, batch = meta_vars(at[:3])
    elements = T.meta_var(kernel.v_rows * CHUNK)
    smem.v_empty.wait(state.stage, state.phase)
    smem.v_full.arrive(state.stage, kernel.v_chunks * elements * ITEM_BYTES)
    for chunk in T.unroll(kernel.v_chunks):
        T.ptx[LOAD.format(4, "")](
            smem.v.ptr_to([state.stage, chunk * elements]),
            T.address_of(tensor_map),
            row + chunk * kernel.chunk_columns,
            0,
            head,
            batch,
            smem.v_full.ptr_to([state.stage]),
        )
    state.advance()


@T.inline
def _load_values(kernel, smem, tensor_map, state, at):
    """Have one thread load a block of values; `at` is as in _load_rows."""
    if kernel.is_float8:
        _load_transposed(kernel, smem, tensor_map, state, at)
    else:
        _load_rows(kernel, (smem.v, smem.v_full, smem.v_empty, kernel.v_chunks), tensor_map, state, at)


@T.inline
def _load_queries(kernel, smem, tensor_map, state, tile):
    """Have one thread load each consumer's rows of queries once its results have left their place."""
    consumers = T.meta_var(kernel.params.consumers)
    for consumer in T.unroll(consumers):
        index = T.meta_var(state.stage * consumers + consumer)
        at = T.meta_var((tile.row + consumer * MMA_TILE_ROWS, tile.head, tile.batch))
        smem.q_empty.wait(index, state.phase)
        smem.q_full.arrive(index, kernel.q_bytes)
        _load_boxes(
            (smem.q, index, kernel.qk_chunks, kernel.chunk_columns), tensor_map, smem.q_full.ptr_to([index]), at, MMA_TILE_ROWS * CHUNK
        )
    state.advance()


@T.inline
def prefetch_first(kernel, maps, cta):
    """Have one thread prefetch to L2 what a CTA loads first: its queries, and its part of a block of keys and of values.

    A prefetch is no access: it changes nothing, and what the preceding kernel still writes goes through the same cache.
    """
    q_map, k_map, v_map = meta_vars(maps[:3])
    tile = Tile(kernel, cta, 0)
    first = T.meta_var((tile.blocks - 1) * kernel.params.block_n + cta[1] * kernel.box_rows)
    kv_head = T.meta_var(tile.head // kernel.spec.group)
    k_head, v_head = T.meta_var(kernel.first_heads)
    for chunk in T.unroll(kernel.qk_chunks):
        for consumer in T.unroll(kernel.params.consumers):
            row = T.meta_var(tile.row + consumer * MMA_TILE_ROWS)
            T.ptx[PREFETCH.format(4)](T.address_of(q_map), chunk * kernel.chunk_columns, row, tile.head, tile.batch)
        T.ptx[PREFETCH.format(4)](T.address_of(k_map), chunk * kernel.chunk_columns, first, k_head + kv_head, tile.batch)
    if not kernel.is_float8:  # values that are transposed come from the preceding kernel
        for chunk in T.unroll(kernel.v_chunks):
            T.ptx[PREFETCH.format(4)](T.address_of(v_map), chunk * CHUNK, first, v_head + kv_head, tile.batch)


@T.inline
def produce(kernel, smem, maps, cta):
    """Have one thread load tile after tile: in the order in which consumers take them, keys one block ahead of values."""
    spec, params = T.meta_var((kernel.spec, kernel.params))
    q_map, k_map, v_map = meta_vars(maps[:3])
    q_state = PipelineState(params.q_stages, 1)
    k_state = PipelineState(params.stages, 1)
    v_state = PipelineState(params.stages, 1)
    keys = T.meta_var((smem.k, smem.k_full, smem.k_empty, kernel.qk_chunks))
    for wave in T.serial(kernel.waves):
        tile = Tile(kernel, cta, wave)
        if tile.exists():
            k_head, v_head = meta_vars([first + tile.head // spec.group for first in kernel.first_heads])
            _load_queries(kernel, smem, q_map, q_state, tile)
            _load_rows(kernel, keys, k_map, k_state, ((tile.blocks - 1) * params.block_n, k_head, tile.batch, cta[1]))
            for i in T.serial(tile.blocks - 1 - tile.first):
                row = T.meta_var((tile.blocks - 2 - i) * params.block_n)
                _load_rows(kernel, keys, k_map, k_state, (row, k_head, tile.batch, cta[1]))
                _load_values(kernel, smem, v_map, v_state, (row + params.block_n, v_head, tile.batch, cta[1]))
            _load_values(kernel, smem, v_map, v_state, (tile.first * params.block_n, v_head, tile.batch, cta[1]))
