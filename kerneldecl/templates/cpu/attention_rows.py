"""Owns how a block of queries comes into columns, and its results into rows: squares of vectors are transposed in registers.

Knows nothing of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.cpu.attention_config import Task
from kerneldecl.templates.cpu.vectors import has_vectors, in_float32, kept, load, loop, rounded, spread, store, transposed

Change = Callable[[Any], Any]
"""Gives what becomes of a number, or of a vector of them."""
Index = Callable[[Any, Any], tuple[Any, ...]]
"""Gives the index of an argument's element by query and column."""


def load_columns(task: Task, source: Any, index: Index, target: Any, columns: Any, change: Change) -> None:
    """Copy so many columns of the block's rows of an argument into rows of `target`, changed.

    Rows beyond the last query repeat it: what is computed of them is not stored.
    """
    kernel, lanes = task.kernel, task.kernel.lanes
    last = T.int64(kernel.spec.queries - 1)

    def row_of(query: Any) -> Any:
        row = task.place.row + query
        return T.bind(tirx.min(row, last)) if kernel.spec.queries % kernel.params.block_m else row

    whole = 0
    if has_vectors(str(source.dtype)):
        whole = columns // lanes
        with loop(kernel.vectors) as part, loop(whole) as square:
            rows = [load(source, index(row_of(part * lanes + lane), square * lanes), lanes) for lane in range(lanes)]
            for at, column in enumerate(transposed(rows)):
                store(target, (square * lanes + at, part * lanes), change(column))
    with loop(columns - whole * lanes) as rest, loop(kernel.params.block_m) as query:
        column = whole * lanes + rest
        T.buffer_store(target, change(in_float32(source[index(row_of(query), column)])), [column, query])


def store_results(task: Task) -> None:
    """Divide results by the sums of powers and store them in rows; a query without a power gives zeros."""
    kernel, lanes, out = task.kernel, task.kernel.lanes, task.kernel.args["O"]
    spec, place = kernel.spec, task.place
    unit = kernel.args["v_scale"][0] if "v_scale" in kernel.args else T.float32(1)
    whole = spec.value_dim // lanes
    with loop(kernel.vectors) as part:
        total = kept(load(task.total, (part * lanes,), lanes))
        inverse = kept(spread(unit, lanes) / total)
        with loop(whole) as square:
            columns = [_quotient(load(task.results, (square * lanes + at, part * lanes), lanes), total, inverse) for at in range(lanes)]
            for at, row in enumerate(transposed(columns)):
                query = T.bind(place.row + part * lanes + at)
                with _within(task, query):
                    store(out, spec.index(place.batch, place.head, query, square * lanes), row)
    if spec.has_logsumexp:
        with loop(kernel.params.block_m) as query, _within(task, place.row + query):
            value = task.highest[query] + T.log(task.total[query])
            T.buffer_store(kernel.args["logsumexp"], value, [place.batch, place.head, place.row + query])
    if spec.value_dim % lanes:
        with loop(kernel.params.block_m) as query, _within(task, place.row + query), loop(spec.value_dim % lanes) as rest:
            column, total = whole * lanes + rest, task.total[query]
            value = _quotient(task.results[column, query], total, unit / total)
            T.buffer_store(out, rounded(value, str(out.dtype)), spec.index(place.batch, place.head, place.row + query, column))


def _quotient(result: Any, total: Any, inverse: Any) -> Any:
    zero = spread(0.0, total.ty.dtype.lanes) if total.ty.dtype.lanes > 1 else T.float32(0)
    return tirx.Select(tirx.EQ(total, zero), zero, result * inverse)


def _within(task: Task, query: Any) -> ExitStack:
    """Return a frame that is taken for queries that there are."""
    spec, frames = task.kernel.spec, ExitStack()
    if spec.queries % task.kernel.params.block_m:
        frames.enter_context(T.If(query < spec.queries))
        frames.enter_context(T.Then())
    return frames
