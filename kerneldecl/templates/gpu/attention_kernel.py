"""Owns the TIRx kernel of attention on mma.sync: the loop over blocks of keys around the online softmax, and the store of results.

Knows nothing of how its parameters are chosen. The structure is that of Dao, FlashAttention-2, 2023.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.templates.gpu.attention_config import AttentionTcKernel
from kerneldecl.templates.gpu.attention_exchange import take_maxima, take_sums, tell_maxima, tell_powers, tell_sums
from kerneldecl.templates.gpu.attention_parts import Workspace, combining, store_part
from kerneldecl.templates.gpu.attention_products import add_results, compute_scores, hold_queries
from kerneldecl.templates.gpu.attention_tile import WORDS, Fragment, Smem, Tile, Warp, load_first, load_rows, store_rows
from kerneldecl.templates.hopper.attention_bias import Rows, prepare
from kerneldecl.templates.hopper.attention_softmax import (
    Softmax,
    add_threads,
    find_highest,
    finish_rows,
    invert_sums,
    load_scales,
    next_softmax,
    rescale,
    scale_results,
    spoil_sums,
    store_sums,
    take_powers,
    to_halves,
)
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.shared.fused_attention import narrow


def _clear(warp: Warp) -> None:
    """Begin with results and sums of zero, and references below all scores."""
    for softmax, results, _, _ in warp.fragments:
        for i in range(2):
            T.buffer_store(softmax.reference, tirx.const(float("-inf"), "float32"), [i])
        for i in range(4):
            T.buffer_store(softmax.total, T.float32(0), [i])
        for i in range(warp.kernel.results):
            T.buffer_store(results, T.float32(0), [i])


def _take_scores(warp: Warp, block: Any) -> None:
    """Turn the scores of a block into powers, and shrink earlier results where maxima have grown."""
    kernel = warp.kernel
    is_masked = warp.tile.is_partial(block) if kernel.has_unseen_keys else False
    for number, (softmax, results, operand, _) in enumerate(warp.fragments):
        next_softmax(softmax, Rows(kernel, warp.tile, warp.first_row(number), (0, warp.lane)), block, is_masked)
        rescale(softmax, results, kernel.results)
        to_halves(softmax, operand)


def _tell_maxima(warp: Warp, block: Any) -> None:
    """Find the maxima of the warp's scores of a block, for all warps of its rows."""
    kernel = warp.kernel
    is_masked = warp.tile.is_partial(block) if kernel.has_unseen_keys else False
    first_key = warp.column * kernel.params.warp_keys
    for number, (softmax, _, _, _) in enumerate(warp.fragments):
        prepare(softmax, Rows(kernel, warp.tile, warp.first_row(number), (0, warp.lane), first_key), block, is_masked)
        find_highest(softmax)
    tell_maxima(warp)


def _tell_powers(warp: Warp) -> None:
    """Turn the warp's scores into powers, for all warps of its rows, and shrink earlier results where maxima have grown."""
    take_maxima(warp)
    for softmax, results, operand, _ in warp.fragments:
        take_powers(softmax)
        rescale(softmax, results, warp.kernel.results)
        to_halves(softmax, operand)
    tell_powers(warp)


@T.inline
def _take_block(warp, matrices, slot, number):
    """Take the `number`-th block: its scores, their powers, and what these add to the results; start later copies when stages are free."""
    stages, tile = T.meta_var((warp.kernel.params.stages, warp.tile))
    now = T.meta_var(slot[0] if stages > 1 else 0)
    # The stage of the block before, which all warps have multiplied.
    before = T.meta_var(0 if stages == 1 else T.Select(slot[0] == 0, stages - 1, slot[0] - 1))
    block = T.meta_var(tile.last - number)
    _, keys, values = meta_vars(warp.copies())
    T.ptx.cp.async_.wait_group(2 * (stages - 1))
    T.cuda.cta_sync()
    load_rows(warp, values, warp.smem.v, before, number + (stages - 1), stages == 1)
    T.ptx.cp.async_.commit_group()
    compute_scores(warp, now, matrices)
    if warp.kernel.is_float8:
        store_rows(warp, values, warp.smem.v, number)
    if warp.shares_rows:
        _tell_maxima(warp, block)
    T.ptx.cp.async_.wait_group(2 * (stages - 1))
    T.cuda.cta_sync()
    load_rows(warp, keys, warp.smem.k, now, number + stages, False)
    T.ptx.cp.async_.commit_group()
    if warp.shares_rows:
        _tell_powers(warp)
        T.cuda.cta_sync()
    else:
        _take_scores(warp, block)
    add_results(warp, now, matrices)
    if warp.kernel.is_float8:
        store_rows(warp, keys, warp.smem.k, number + 1)
    if stages > 1:
        slot[0] = T.Select(slot[0] == stages - 1, 0, slot[0] + 1)


@T.inline
def _go_through_blocks(warp):
    """Go through the blocks of keys, from the last that the tile sees to the first."""
    params = T.meta_var(warp.kernel.params)
    matrices = T.alloc_local((4,), "uint32")
    slot = T.alloc_local((1,), "int32")
    load_first(warp)
    _clear(warp)
    if params.q_in_registers == 1:
        T.ptx.cp.async_.wait_group(2 * (params.stages - 1))
        T.cuda.cta_sync()
        hold_queries(warp)
    slot[0] = 0
    for i in T.serial(warp.tile.blocks):
        _take_block(warp, matrices, slot, i)
    T.ptx.cp.async_.wait_group(0)


def _round_results(warp: Warp, packed: Any) -> None:
    """Store a warp's results, rounded, to the place of its queries, which it alone has read."""
    kernel = warp.kernel
    is_wide = kernel.spec.result_dtype == "float32"
    words = 8 if is_wide else 4
    first = warp.column * (kernel.results // 4 * words) if warp.shares_rows else 0
    for number, (softmax, results, _, _) in enumerate(warp.fragments):
        if warp.shares_rows:
            invert_sums(softmax)
        else:
            finish_rows(softmax)
        if kernel.is_float8:
            scale_results(softmax)
        for i in range(0, kernel.results, 2):
            half = i % 4 // 2
            row = warp.smem_row + number * FRAGMENT + warp.lane // 4 + half * 8
            pair = [results[i + place] * softmax.factor[half] for place in range(2)]
            column = first + i // 4 * words
            if is_wide:
                for place in range(2):
                    word = column + warp.lane % 4 * 2 + place
                    T.buffer_store(warp.smem.q, T.reinterpret("uint32", pair[place]), [row, word])
            else:
                T.evaluate(T.ptx[narrow(kernel.spec.result_dtype)](packed[0], pair[1], pair[0]))
                T.buffer_store(warp.smem.q, packed[0], [row, column + warp.lane % 4])


def _share_sums(warp: Warp) -> None:
    """Add up the rows' sums of all threads and warps that share them."""
    for fragment in warp.fragments:
        add_threads(fragment.softmax)
    if warp.shares_rows:
        tell_sums(warp)
        T.evaluate(T.cuda.cta_sync())
        take_sums(warp)


def _store_part(warp: Warp, workspace: Workspace, part: Any) -> None:
    """Store a warp's results of its part of the keys."""
    _share_sums(warp)
    for fragment in warp.fragments:
        spoil_sums(fragment.softmax)
    store_part(warp, workspace, part)


def _store_sums(warp: Warp) -> None:
    for number, fragment in enumerate(warp.fragments):
        store_sums(fragment.softmax, warp.kernel.argument("logsumexp"), warp.tile, warp.first_row(number), (0, warp.lane))


def _word(warp: Warp, row: Any, piece: Any) -> Any:
    """Return where a piece of a row of results begins, in words."""
    spec = warp.kernel.spec
    shape = spec.shape(spec.heads, spec.queries, warp.kernel.out_pieces * WORDS)
    index = spec.index(warp.tile.batch, warp.tile.head, row, piece * WORDS)
    return ((index[0] * shape[1] + index[1]) * shape[2] + index[2]) * shape[3] + index[3]


@T.inline
def _store_results(warp):
    """Store a warp's results, or with others those of their rows, in whole rows."""
    kernel, spec = T.meta_var((warp.kernel, warp.kernel.spec))
    rows, pieces = T.meta_var((kernel.params.warp_rows, kernel.out_pieces))
    lane, lanes = T.meta_var((warp.group_lane, kernel.params.column_warps * WARP_LANES))
    out = T.meta_var(kernel.arguments["O"])
    words = T.decl_buffer((spec.batch * spec.heads * spec.queries * pieces * WORDS,), "uint32", data=out.data)
    packed = T.alloc_local((1,), "uint32")
    if warp.shares_rows:
        _share_sums(warp)
    _round_results(warp, packed)
    if spec.has_logsumexp:
        _store_sums(warp)
    if warp.shares_rows:
        T.cuda.cta_sync()
    else:
        T.cuda.warp_sync()
    for i in T.unroll(-(-rows * pieces // lanes)):
        index = T.meta_var(i * lanes + lane)
        row, piece = T.meta_var((index // pieces, index % pieces))
        at = T.meta_var(warp.smem_row + row)
        if T.And(index < rows * pieces, warp.tile.row + at < spec.queries):
            first: T.let = _word(warp, warp.tile.row + at, piece)
            for w in T.vectorized(WORDS):
                words[first + w] = warp.smem.q[at, piece * WORDS + w]


def _fragment(kernel: AttentionTcKernel, scales: Any) -> Fragment:
    """Return the registers of a fragment of rows."""
    scores, results = T.alloc_local((kernel.scores,), "float32"), T.alloc_local((kernel.results,), "float32")
    # Where powers are exchanged, what multiplies values goes there as well.
    operand = T.alloc_local((max(4, kernel.scores // 2),), "uint32")
    queries = T.alloc_local((4 * (kernel.score_steps if kernel.params.q_in_registers else 1),), "uint32")
    reference, factor = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
    total, partial = T.alloc_local((4,), "float32"), T.alloc_local((4,), "float32")
    softmax = Softmax(kernel, scores, reference, total, factor, partial, T.alloc_local((1,), "int32"), scales)
    return Fragment(softmax, results, operand, queries)


def _fragments(kernel: AttentionTcKernel) -> tuple[Fragment, ...]:
    scales = T.alloc_local((3,), "float32") if kernel.is_float8 else None
    return tuple(_fragment(kernel, scales) for _ in range(kernel.params.fragments))


def _staged(kernel: AttentionTcKernel) -> Any:
    """Return the registers in which a thread holds its part of a block of keys or values of float8."""
    count = kernel.params.staged_words(kernel.params.block_n, kernel.rows.most_pieces)
    return T.alloc_local((count,), "uint32") if kernel.is_float8 else None


def _exchanged(kernel: AttentionTcKernel, pool: Any) -> tuple[Any, ...]:
    """Return the shared memory in which warps with the same rows exchange powers, and maxima and sums."""
    params = kernel.params
    if params.column_warps == 1:
        return ()
    powers = pool.alloc((params.block_m, params.power_pitch // 4), "uint32", align=16)
    return powers, pool.alloc((params.warps, params.column_warps, params.warp_rows), "float32", align=16)


@T.inline
def _run(kernel, workspace, block, warp_id, lane):
    params = T.meta_var(kernel.params)
    pool = T.SMEMPool()  # names of its buffers stand in the generated code
    queries = pool.alloc((params.block_m, kernel.rows.q_pitch // 4), "uint32", align=16)
    keys = pool.alloc((params.stages, params.block_n, kernel.rows.qk_pitch // 4), "uint32", align=16)
    values = pool.alloc((params.stages, params.block_n, kernel.rows.v_pitch // 4), "uint32", align=16)
    exchanged = T.meta_var(_exchanged(kernel, pool))
    pool.commit()
    tile = Tile(kernel, block)
    fragments = T.meta_var(_fragments(kernel))
    warp = T.meta_var(Warp(kernel, Smem(queries, keys, values, *exchanged), warp_id, lane, tile, fragments, _staged(kernel)))
    if kernel.has_pdl:
        # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
    if kernel.is_float8:
        load_scales(fragments[0].softmax)
    _go_through_blocks(warp)
    if params.split_k > 1:
        _store_part(warp, workspace, block % params.split_k)
    else:
        _store_results(warp)


def build(kernel: AttentionTcKernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, on the attention's parameters."""
    params, workspace = kernel.params, Workspace.of(kernel)

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": params.ctas_per_sm})
        if kernel.has_pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.ctas])
        warp = T.warp_id([params.warps * params.column_warps])
        lane = T.lane_id([WARP_LANES])
        _run(kernel, workspace, block, warp, lane)

    body = main.body
    if params.split_k > 1:
        body = tirx.SeqStmt([tirx.AllocBuffer(workspace.results), tirx.AllocBuffer(workspace.stats), body, combining(kernel, workspace)])
    func = tirx.PrimFunc(list(kernel.arguments.values()), body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
