"""Owns the tile of a CTA of attention on mma.sync, what its warps hold, and the copies of queries, keys and values by cp.async.

Knows nothing of what is computed of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.compiler.intrinsics.int4_dot import cp_async_source
from kerneldecl.templates.gpu.attention_config import AttentionTcKernel
from kerneldecl.templates.gpu.attention_float8 import LOAD_SOURCE, store_source
from kerneldecl.templates.hopper.attention_softmax import Softmax
from kerneldecl.templates.hopper.epilogue import meta_vars

WORDS = VECTOR_BYTES // 4
"""Words that one cp.async copies."""


class Copy(NamedTuple):
    """How a CTA's threads copy rows of an argument: neighbouring threads copy neighbouring pieces of a row."""

    buffer: Any
    first_head: int
    """Head of the argument that is this one's first: packed arguments have others before it."""
    rows: int
    """Rows that each head has."""
    pieces: int
    """Pieces of a row in shared memory, with those of zeros that fill its last fragment."""
    real: int
    """Pieces of a row in memory."""


class Fragment(NamedTuple):
    """16 rows of queries of a warp, while a kernel's script is read."""

    softmax: Softmax
    results: Any
    """Registers of results, not yet divided by the sums of their rows."""
    operand: Any
    """Registers of powers, rounded: the operand A of mma."""
    queries: Any
    """Registers of queries: of all steps, or of one."""


class Smem(NamedTuple):
    """Shared memory of a CTA, in rows of words."""

    q: Any
    """Queries, and at the end results."""
    k: Any
    v: Any
    powers: Any = None
    """Powers of a block, of 16 bits, which warps that share rows exchange."""
    rows: Any = None
    """Maxima of rows of a block, or sums, of each such warp: [group of warps, warp, row]."""


class Warp(NamedTuple):
    """A warp's view of the kernel, while its script is read."""

    kernel: AttentionTcKernel
    smem: Smem
    warp: Any
    lane: Any
    tile: Any
    fragments: tuple[Fragment, ...]
    staged: Any = None
    """Registers of a block's keys or values of float8, until these are stored in shared memory."""

    @property
    def thread(self) -> Any:
        return self.warp * WARP_LANES + self.lane

    @property
    def shares_rows(self) -> bool:
        return self.kernel.params.column_warps > 1

    @property
    def group(self) -> Any:
        """Return which of the CTA's warps' rows it has."""
        return self.warp // self.kernel.params.column_warps if self.shares_rows else self.warp

    @property
    def column(self) -> Any:
        """Return which of the warps with the same rows it is."""
        return self.warp % self.kernel.params.column_warps if self.shares_rows else 0

    @property
    def group_lane(self) -> Any:
        """Return which of the threads of the warps with the same rows it is."""
        return self.column * WARP_LANES + self.lane if self.shares_rows else self.lane

    @property
    def smem_row(self) -> Any:
        """Return the first of its rows in shared memory."""
        return self.group * self.kernel.params.warp_rows

    @property
    def kv_head(self) -> Any:
        return self.tile.head // self.kernel.spec.group

    def copies(self) -> tuple[Copy, Copy, Copy]:
        """Return how queries, keys and values are copied."""
        kernel, spec = self.kernel, self.kernel.spec
        is_packed, arguments = spec.layout == "packed", kernel.arguments
        q, k, v = (arguments["QKV" if is_packed else name] for name in "QKV")
        first_of_k, first_of_v = kernel.first_heads
        real = spec.head_dim // kernel.piece
        return (
            Copy(q, 0, spec.queries, kernel.qk_pieces, real),
            Copy(k, first_of_k, spec.keys, kernel.qk_pieces, real),
            Copy(v, first_of_v, spec.keys, kernel.v_pieces, spec.value_dim // kernel.piece),
        )

    def first_row(self, number: int) -> Any:
        """Return the first of the rows of a fragment."""
        return self.tile.row + self.smem_row + number * FRAGMENT


@T.meta_class
class Tile:
    """The tile of a CTA: which head, which rows, how many blocks of keys they see, and which is the last of these."""

    def __init__(self, kernel: AttentionTcKernel, block: Any) -> None:
        self.kernel = kernel
        self.batch = T.local_scalar("int32")
        self.head = T.local_scalar("int32")
        self.row = T.local_scalar("int32")
        self.blocks = T.local_scalar("int32")
        self.last = T.local_scalar("int32")
        self._place(block)

    @T.inline
    def _place(self, block):
        kernel, spec, params = T.meta_var((self.kernel, self.kernel.spec, self.kernel.params))
        index = T.meta_var(block // params.split_k if params.split_k > 1 else block)
        tile, flat = T.meta_var(kernel.place(index, (kernel.row_tiles, kernel.all_heads), kernel.heads_together))
        self.head = flat % spec.heads
        self.batch = flat // spec.heads
        self.row = tile * params.block_m
        first_key, stop = meta_vars(self._keys())
        self.last = (stop + params.block_n - 1) // params.block_n - 1
        self.blocks = T.max(0, self.last + 1 - first_key // params.block_n)
        if params.split_k > 1:
            part = T.meta_var(block % params.split_k)
            begin: T.let = self.blocks * part // params.split_k
            self.last = self.last - begin
            self.blocks = self.blocks * (part + 1) // params.split_k - begin

    def _keys(self) -> tuple[Any, Any]:
        """Return the first key that some row of the tile sees, and the one behind the last."""
        spec, band = self.kernel.spec, self.kernel.spec.band
        first = 0 if band.lower is None else T.max(0, self.row + band.lower)
        rows = T.min(self.row + self.kernel.params.block_m, spec.queries)
        return first, spec.keys if band.upper is None else T.max(0, T.min(rows + band.upper, spec.keys))

    def is_partial(self, block: Any) -> Any:
        """Say whether some row does not see all keys of a block."""
        spec, band, params = self.kernel.spec, self.kernel.spec.band, self.kernel.params
        stop = (block + 1) * params.block_n
        found = [stop > spec.keys] if spec.keys % params.block_n else []
        found += [] if band.upper is None else [stop > self.row + band.upper + 1]
        found += [] if band.lower is None else [block * params.block_n < self.row + params.block_m - 1 + band.lower]
        return functools.reduce(T.Or, found)


class Rows(NamedTuple):
    """Some rows of an argument on their way to shared memory."""

    copy: Copy
    to: tuple[Any, tuple[Any, ...]]
    """The buffer there, and the index in front of a row."""
    head: Any
    first: Any
    """The first row."""
    extent: int
    """How many."""
    is_checked: bool
    """Whether some may be beyond the last: zeros come in their place."""


def _for_each_piece(warp: Warp, rows: Rows, act: Callable[[int, Any, Any, Any], None]) -> None:
    """Have a thread do something with each of its pieces: `act` takes its number, its places there and here, and its bytes, or 0 for zeros.

    As many threads take part as are a multiple of a row's pieces: then each of them has the same piece of all its rows.
    """
    copy, (buffer, stage), head, first, count, is_checked = rows
    spec, threads = warp.kernel.spec, warp.kernel.params.threads
    pieces = copy.pieces
    step = threads // pieces
    row_in_pass, piece = warp.thread // pieces, warp.thread % pieces
    column = (piece if copy.real == pieces else T.min(piece, copy.real - 1)) * warp.kernel.piece
    for number in range(-(-count // step)):
        row = row_in_pass + number * step
        at = T.min(first + row, copy.rows - 1) if is_checked else first + row
        asked = [first + row < copy.rows] if is_checked else []
        asked += [piece < copy.real] if copy.real < pieces else []
        size = T.Select(T.And(*asked) if len(asked) == 2 else asked[0], VECTOR_BYTES, 0) if asked else VECTOR_BYTES
        there = buffer.ptr_to([*stage, row, piece * WORDS])
        here = copy.buffer.ptr_to(spec.index(warp.tile.batch, head + copy.first_head if copy.first_head else head, at, column))
        is_partial = threads % pieces or (number + 1) * step > count
        if is_partial:
            inside = T.And(row_in_pass < step, row < count) if (number + 1) * step > count else row_in_pass < step
            with T.If(inside), T.Then():
                act(number, there, here, size)
        else:
            act(number, there, here, size)


def _start_copy(warp: Warp, rows: Rows) -> None:
    """Start to copy rows by cp.async."""
    name, source = cp_async_source(VECTOR_BYTES)

    def copy(_: int, there: Any, here: Any, size: Any) -> None:
        T.evaluate(T.cuda.func_call(name, there, here, size, source_code=source))

    _for_each_piece(warp, rows, copy)


def _stage(warp: Warp, rows: Rows, staged: Any) -> None:
    """Load rows of float8 to registers."""

    def load(number: int, _: Any, here: Any, size: Any) -> None:
        T.evaluate(T.cuda.func_call("tvm_attention_load8", staged.ptr_to([number * 2]), here, size, source_code=LOAD_SOURCE))

    _for_each_piece(warp, rows, load)


def _store_staged(warp: Warp, rows: Rows, staged: Any) -> None:
    """Store rows of float8 from registers to shared memory, as float16."""
    source = store_source(has_conversion=warp.kernel.converts_float8)

    def store(number: int, there: Any, _: Any, __: Any) -> None:
        words = staged[number * 2], staged[number * 2 + 1]
        T.evaluate(T.cuda.func_call("tvm_attention_store8", there, *words, source_code=source))

    _for_each_piece(warp, rows, store)


def _load_queries(warp: Warp) -> None:
    copy, params = warp.copies()[0], warp.kernel.params
    is_checked = copy.rows % params.block_m != 0
    rows = Rows(copy, (warp.smem.q, ()), warp.tile.head, warp.tile.row, params.block_m, is_checked)
    if warp.kernel.is_float8:
        staged = T.alloc_local((params.staged_words(params.block_m, copy.pieces),), "uint32")
        _stage(warp, rows, staged)
        _store_staged(warp, rows, staged)
    else:
        _start_copy(warp, rows)


def _block(warp: Warp, copy: Copy, ring: Any, stage: Any, number: Any, *, is_checked: bool) -> Rows:
    """Return the rows of the block of keys or values that is the `number`-th to be taken."""
    count = warp.kernel.params.block_n
    first = (warp.tile.last - number) * count
    return Rows(copy, (ring, (stage,)), warp.kv_head, first, count, is_checked and copy.rows % count != 0)


@T.inline
def load_rows(warp, copy, ring, stage, number, is_checked):
    """Start to copy the block of keys or values that is the `number`-th to be taken, if there is one; only the first may be cut off."""
    if number < warp.tile.blocks:
        if warp.kernel.is_float8:
            _stage(warp, _block(warp, copy, ring, stage, number, is_checked=is_checked), warp.staged)
        else:
            _start_copy(warp, _block(warp, copy, ring, stage, number, is_checked=is_checked))


@T.inline
def store_rows(warp, copy, ring, number):
    """Store the block of float8 that `load_rows` has loaded, if there is one."""
    if number < warp.tile.blocks:
        _store_staged(warp, _block(warp, copy, ring, 0, number, is_checked=False), warp.staged)


@T.inline
def load_first(warp):
    """Start the copies of queries and of the first blocks: of keys one for each stage, of values one less."""
    stages = T.meta_var(warp.kernel.params.stages)
    _, keys, values = meta_vars(warp.copies())
    _load_queries(warp)
    load_rows(warp, keys, warp.smem.k, 0, 0, True)
    if warp.kernel.is_float8:
        store_rows(warp, keys, warp.smem.k, 0)
    T.ptx.cp.async_.commit_group()
    for i in T.unroll(stages - 1):
        load_rows(warp, values, warp.smem.v, i, i, True)
        T.ptx.cp.async_.commit_group()
        load_rows(warp, keys, warp.smem.k, i + 1, i + 1, False)
        T.ptx.cp.async_.commit_group()
