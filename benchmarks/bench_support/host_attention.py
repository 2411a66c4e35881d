"""Owns the comparison of attention on the host CPU with torch's scaled_dot_product_attention, and its goal.

Knows nothing of how kernels are chosen: it builds a workspace through the public interface. Calls of both alternate in one process, on the
same arrays, with as many threads each.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench_support.table import machine, quantiles, show, show_machine, write_json
from host import Comparison, Stopwatch

ROOT = Path(__file__).parent.parent / "attention" / "host"
GOAL = 1.0
"""Torch's time by ours."""


def compare(patterns: Sequence[str], top_k: int, rounds: int, folder: Path | None, json: Path | None) -> None:
    """Build the entries in a folder, a temporary one if None, time them beside torch and print the table."""
    about = machine()
    threads = str(about["cores"])
    os.environ.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, TVM_NUM_THREADS=threads)  # before torch and TVM start threads
    show_machine(about)
    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="attention-") as place:
        root = Path(place).resolve()
        root.mkdir(parents=True, exist_ok=True)
        declared = (ROOT / "workloads.toml").read_text(encoding="utf-8").replace("top_k = 20", f"top_k = {top_k}")
        (root / "workloads.toml").write_text(declared, encoding="utf-8")
        rows = _rows(root, patterns, rounds)
        shutil.rmtree(root / "dist", ignore_errors=True)
    show(f"Attention beside torch, {threads} threads each (torch: its time by ours, median of paired rounds; goal {GOAL})", rows)
    write_json(json, about, {"entries": rows})


def _rows(root: Path, patterns: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    import torch

    import kerneldecl

    stopwatch = Stopwatch()
    artifact = kerneldecl.build(root, report=stopwatch)["host"]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    chosen = [entry for entry in artifact.manifest["entries"] if any(Path(entry["name"]).match(pattern) for pattern in patterns)]
    return [_row(artifact, entry, root, rounds) | {"tuning s": stopwatch.secs.get(entry["name"])} for entry in chosen]


def _row(artifact: Any, entry: dict[str, Any], root: Path, rounds: int) -> dict[str, Any]:
    import numpy as np
    import torch

    from kerneldecl.arrays import aligned, finite_rms, poisoned, relative_error, row_scales
    from kerneldecl.plugins.load import load_rule

    rule = load_rule(root, entry["rule"]).of(root, entry["attrs"])
    inputs = [aligned(array) for array in rule.inputs(np.random.default_rng(0))]
    out = aligned(poisoned(rule.signature().outputs[0]))
    q, k, v = (torch.from_numpy(array).transpose(1, 2) if rule.layout == "bshd" else torch.from_numpy(array) for array in inputs)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=rule.causal)
    both = Comparison(functools.partial(artifact[entry["name"]], *inputs, out), attend)
    both.kernel()
    found = attend().transpose(1, 2).numpy() if rule.layout == "bshd" else attend().numpy()
    want = rule.reference(*inputs)
    scales = row_scales(want, finite_rms(want)) if rule.rows_vary() else None
    samples = both.pairs(rounds)
    low, ratio, high = quantiles([theirs / ours for ours, theirs in samples])
    ours, theirs = (quantiles(column)[1] for column in zip(*samples, strict=True))
    least, their_least = (min(column) for column in zip(*samples, strict=True))
    return {
        "entry": entry["name"],
        "ms": ours * 1e3,
        "torch ms": theirs * 1e3,
        "torch": round(ratio, 3),
        "10 %": round(low, 3),
        "90 %": round(high, 3),
        "of bests": round(their_least / least, 3),
        "GFLOP/s": entry["flops"] / least / 1e9,
        "error": relative_error(out, want, scales),
        "torch's error": relative_error(found, want, scales),
        "within": "yes" if ratio >= GOAL else "NO",
    }
