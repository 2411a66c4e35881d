"""Owns what is predicted of a network from its kernels' times: their sum under each protocol, beside the network's time in its CUDA graph.

Knows nothing of how models are tuned. What runs the model needs torch, imported before TVM, in a process of its own.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from kerneldecl.store.local import LocalStore, Record
from kerneldecl.store.results import TuneResult
from kerneldecl.timing import PROTOCOLS, median, timing_of

Row = dict[str, Any]
Secs = Mapping[str, float]
"""Seconds by protocol."""


def recorded(workspace: Path, artifact: Path) -> dict[str, Secs]:
    """Return the seconds of an artifact's kernels under each protocol, by their symbols, as the workspace's records have them."""
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    store, kind = LocalStore(workspace / "cache"), manifest["arch"]["kind"]
    found: dict[str, Secs] = {}
    for entry in manifest["entries"]:
        record = store.read("tune", entry["key"], is_local=False)
        if isinstance(record, Record):
            winner = TuneResult(record.key, record.result).trials[0]
            protocol = next(line for line in record.manifest.splitlines() if line.startswith("search.protocol = "))
            chosen_by = timing_of(kind, protocol.partition(" = ")[2].strip('"'))
            found[entry["symbol"]] = {chosen_by: winner.run_secs, **{name: median(samples) for name, samples in winner.timings}}
    return found


def predicted(secs: Mapping[str, Secs], calls: Mapping[str, int], kind: str = "cuda") -> dict[str, float]:
    """Return the sum of a network's kernels under each protocol that all of them were timed under; `calls` counts each symbol's calls."""
    known = {symbol: count for symbol, count in calls.items() if symbol in secs}
    everywhere = (protocol for protocol in PROTOCOLS[kind] if known and all(protocol in secs[symbol] for symbol in known))
    return {protocol: sum(count * secs[symbol][protocol] for symbol, count in known.items()) for protocol in everywhere}


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each protocol, the one first whose sums are nearest to the networks' times: the mean factor that they are off by."""
    protocols = [protocol for protocol in PROTOCOLS["cuda"] if rows and all(protocol in row["sums"] for row in rows)]
    found = []
    for protocol in protocols:
        ratios = [row["sums"][protocol] / row["graph_secs"] for row in rows]
        off = math.exp(sum(abs(math.log(ratio)) for ratio in ratios) / len(ratios))
        found.append(
            {"protocol": protocol, "off by": off, "sum / network": geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}
        )
    return sorted(found, key=lambda row: float(row["off by"]))


def measured(model: str, dtype: str, library: tuple[str, str], l2_bytes: int) -> Row:
    """Return seconds of the network in its CUDA graph, rested and steady, and how often it calls each function; on torch's stream."""
    import torch
    import tvm
    from bench_support.gpu.timing import Replay, alone, flusher, rested
    from bench_support.models.comparison import SETS, made

    from kerneldecl.relax import load_model

    _, args = made(model, dtype)
    machine = load_model(*library, tvm.cuda(0))
    sets = [tuple(tvm.runtime.from_dlpack(arg.to("cuda", copy=True)) for arg in args) for _ in range(SETS)]

    def call(index: int) -> Any:
        import tvm_ffi

        with tvm_ffi.use_torch_stream():
            return machine["main"](*sets[index])

    replay = Replay(call, SETS, flusher(l2_bytes))
    found = {"graph_secs": alone(replay), "rested_secs": rested(replay)}
    calls: Counter[str] = Counter()

    def hook(_function: Any, name: str, is_before: bool, _result: Any, *_arguments: Any) -> None:
        if is_before and not name.startswith("vm.builtin."):
            calls[name] += 1

    machine.instrument(hook)
    call(0)
    torch.cuda.synchronize()
    return {**found, "calls": dict(calls)}
