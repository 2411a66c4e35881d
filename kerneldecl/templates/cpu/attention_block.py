"""Owns what attention on CPUs makes of a block of keys: scores, powers relative to the highest score until then, weighted values.

Knows nothing of arguments' layouts or of tasks.

The products are GEMMs whose register tiles hold rows of keys (of values' elements) by vectors of queries. Keys and values are read one by
one and spread over a vector, so they need no packing; highest scores and sums are taken within lanes.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.cpu.attention_config import Task
from kerneldecl.templates.cpu.vectors import in_float32, kept, larger, load, loop, power, spread, store, variable


def clear(task: Task) -> None:
    """Set what is summed over keys. The highest score of none is finite: differences to it are no NaN."""
    kernel, lanes = task.kernel, task.kernel.lanes
    for vector in range(kernel.vectors):
        store(task.before, (vector * lanes,), tirx.Broadcast(T.min_value("float32"), lanes))
        store(task.highest, (vector * lanes,), tirx.Broadcast(T.min_value("float32"), lanes))
        store(task.total, (vector * lanes,), spread(0.0, lanes))
        with loop(kernel.spec.value_dim) as element:
            store(task.results, (element, vector * lanes), spread(0.0, lanes))


def add_block(task: Task, first: Any, count: Any) -> None:
    """Add so many keys, from the first, to the block's results."""
    params, value_dim = task.kernel.params, task.kernel.spec.value_dim
    with loop((count + params.tile_n - 1) // params.tile_n) as tile:
        _scores(task, first, count, T.bind(tile * params.tile_n))
    _powers(task, count)
    with loop(value_dim // params.tile_e) as tile:
        _weigh(task, (first, count), tile * params.tile_e, params.tile_e)
    if value_dim % params.tile_e:
        _weigh(task, (first, count), T.int64(value_dim // params.tile_e * params.tile_e), value_dim % params.tile_e)


def _tile(task: Task, rows: int) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return the rows of a register tile, and the row and the first query of each of its vectors."""
    lanes, block_m = task.kernel.lanes, task.kernel.params.block_m
    return [variable(block_m) for _ in range(rows)], [(row, at) for row in range(rows) for at in range(0, block_m, lanes)]


def _multiply(task: Task, tile: list[Any], row: Any, factors: list[Any]) -> None:
    """Accumulate an outer product: each row of the tile adds its factor times a row of vectors, whose lanes are queries."""
    lanes = task.kernel.lanes
    vectors = [kept(load(row[0], (row[1], vector * lanes), lanes)) for vector in range(task.kernel.vectors)]
    for at, factor in enumerate(factors):
        spread_factor = kept(spread(factor, lanes))
        for vector, numbers in enumerate(vectors):
            store(tile[at], (vector * lanes,), load(tile[at], (vector * lanes,), lanes) + numbers * spread_factor)


def _scores(task: Task, first: Any, count: Any, start: Any) -> None:
    """Compute the scores of a tile of keys. A tile that goes beyond the block repeats its last key, which changes no highest score."""
    kernel, lanes = task.kernel, task.kernel.lanes
    tile, parts = _tile(task, kernel.params.tile_n)
    within = [start + at for at in range(kernel.params.tile_n)]
    if kernel.has_uneven_tiles:
        within = [T.bind(tirx.min(at, count - 1)) for at in within]
    for row, query in parts:
        store(tile[row], (query,), spread(0.0, lanes))
    with loop(kernel.spec.head_dim) as element:
        _multiply(task, tile, (task.queries, element), [task.keys(task.place, first + at, element) for at in within])
    keys = [first + at for at in within]
    for row, query in parts:
        score = load(tile[row], (query,), lanes)
        biased = _biased(task, score, (keys[row], within[row]), query)
        if biased is not score:
            store(tile[row], (query,), biased)
    _hide(task, tile, parts, keys)
    for vector in range(kernel.vectors):
        highest = kept(load(task.highest, (vector * lanes,), lanes))
        for row in range(kernel.params.tile_n):
            score = kept(load(tile[row], (vector * lanes,), lanes))
            store(task.powers, (start + row, vector * lanes), score)
            highest = kept(larger(highest, score))
        store(task.highest, (vector * lanes,), highest)


def _biased(task: Task, score: Any, at: tuple[Any, Any], query: int) -> Any:
    """Return a key's scores, capped and biased; `at` is the key and its place in the block."""
    (key, within), kernel, lanes = at, task.kernel, task.kernel.lanes
    spec = kernel.spec
    if spec.softcap:
        cap = spread(spec.softcap, lanes)
        score = kept(tirx.tanh(kept(score / cap)) * cap)
    if spec.alibi is not None:
        first = tirx.Cast("int32", task.place.row + spec.alibi - key) + query
        distance = tirx.Cast(f"float32x{lanes}", tirx.Ramp(first, T.int32(1), lanes))
        score = score - spread(kernel.args["slopes"][task.place.head], lanes) * tirx.abs(distance)
    if not spec.has_mask:
        return score
    if task.bias is None:
        bias = spread(in_float32(kernel.args["mask"][kernel.mask_index(task.place, 0, key)]), lanes)
    else:
        bias = load(task.bias, (within, query), lanes)
    # What a choice hides may be NaN.
    return tirx.Select(bias < spread(0.0, lanes), bias, score) if spec.bias_dtype == "bool" else score + bias


def _hide(task: Task, tile: list[Any], parts: list[tuple[int, int]], keys: list[Any]) -> None:
    """Give the scores of keys outside a query's band minus infinity, in tiles that have such keys."""
    lanes, row_of, (lower, upper) = task.kernel.lanes, task.place.row, task.kernel.spec.band
    limits = []
    if upper is not None:
        limits.append((keys[-1] > row_of + upper, upper, tirx.LE))
    if lower is not None:
        limits.append((keys[0] < row_of + task.kernel.params.block_m - 1 + lower, lower, tirx.GE))
    for is_beyond, limit, compare in limits:
        with T.If(is_beyond), T.Then():
            for row, query in parts:
                distance = tirx.Broadcast(tirx.Cast("int32", keys[row] - row_of - limit), lanes)
                seen = compare(distance, tirx.Ramp(T.int32(query), T.int32(1), lanes))
                store(tile[row], (query,), tirx.Select(seen, load(tile[row], (query,), lanes), spread(-math.inf, lanes)))


def _powers(task: Task, count: Any) -> None:
    """Replace the block's scores by their powers, and add these to the sums."""
    lanes = task.kernel.lanes
    for vector in range(task.kernel.vectors):
        at = vector * lanes
        total = variable(lanes)
        highest = kept(load(task.highest, (at,), lanes))
        shrink = power(load(task.before, (at,), lanes) - highest)
        store(task.shrink, (at,), shrink)
        store(task.before, (at,), highest)
        store(total, (0,), load(task.total, (at,), lanes) * shrink)
        with loop(count) as key:
            value = power(load(task.powers, (key, at), lanes) - highest)
            store(task.powers, (key, at), value)
            store(total, (0,), load(total, (0,), lanes) + value)
        store(task.total, (at,), load(total, (0,), lanes))


def _weigh(task: Task, keys: tuple[Any, Any], start: Any, elements: int) -> None:
    """Add the block's values, weighted by powers, to a tile of the results: so many elements from the first."""
    lanes, (first, count) = task.kernel.lanes, keys
    tile, parts = _tile(task, elements)
    for row, query in parts:
        shrink = load(task.shrink, (query,), lanes)
        store(tile[row], (query,), load(task.results, (start + row, query), lanes) * shrink)
    with loop(count) as key:
        _multiply(task, tile, (task.powers, key), [task.values(task.place, first + key, start + row) for row in range(elements)])
    for row, query in parts:
        store(task.results, (start + row, query), load(tile[row], (query,), lanes))
