"""Owns the protocols by which kernels are timed: what each means, which of them a device has, and by which winners are chosen.

Knows nothing of how a sample is taken, of races or of records.

| protocol | a sample on a GPU, caches cold | a sample on a CPU |
|---|---|---|
| cool | launches back to back in one CUDA graph, after a rest as long as the sample before | |
| steady | the same without rests: at the clock that the kernel's own power then allows | calls back to back, caches warm |
| isolated | each launch behind a small kernel of others, whose own time is taken away | a call behind another function, caches flushed |
| chained | each launch behind a small kernel that lets it start early, as ours do; that one's own time is taken away | |

`timing` in workloads.toml says by which of them winners are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Timings = tuple[tuple[str, tuple[float, ...]], ...]
"""Seconds of one call each, by protocol: of a finalist, under those of its device that have not chosen it."""
Protocol = Literal["cool", "steady", "isolated", "chained"]
PROTOCOLS: Mapping[str, tuple[Protocol, ...]] = {"cpu": ("steady", "isolated"), "cuda": ("cool", "steady", "isolated", "chained")}
"""The protocols of each kind of arch; their times stand in records, those of finalists under all of them."""
TIMINGS = ("cool", "steady", "isolated", "both")
"""What `timing` may be. "both": the geometric mean of steady and isolated."""
DEFAULT_TIMING = "cool"
_MEASURING: Mapping[str, Mapping[str, str]] = {
    # A CPU's clock does not depend on what ran a millisecond before: there is nothing to rest from.
    "cpu": {"cool": "cpu-warm-2", "steady": "cpu-warm-2", "isolated": "cpu-isolated-2", "both": "cpu-both-2"},
    "cuda": {
        "cool": "cuda-graph-cold-3",
        "steady": "cuda-graph-steady-1",
        "isolated": "cuda-graph-isolated-1",
        "both": "cuda-graph-both-1",
    },
}
"""Names of protocols in keys, by kind of arch and timing: one rises where its times are no longer comparable."""


def median(samples: Sequence[float]) -> float:
    """Return the middle of samples, or the mean of the two that are: as `statistics.median`, which null builds do without."""
    ranked, middle = sorted(samples), len(samples) // 2
    return ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2


def measuring(kind: str, timing: str = DEFAULT_TIMING) -> str:
    """Return what keys have of how winners are chosen: the same text where the outcome is the same."""
    return _MEASURING[kind][timing]


def raced(kind: str, timing: str) -> tuple[Protocol, ...]:
    """Return the protocols of which a race's samples are the geometric mean."""
    if timing == "both":
        return ("steady", "isolated")
    return next((protocol,) for protocol in (timing, "steady") if protocol in PROTOCOLS[kind])


def timing_in_words(kind: str, timing: str) -> str:
    """Return what a timing is called on a kind of device: a protocol that it has, or "both"."""
    return timing if timing == "both" else raced(kind, timing)[0]


def timing_of(kind: str, name: str) -> str:
    """Return what the timing is called that a key's text stands for; empty for one of another version."""
    found = (timing for timing, text in _MEASURING.get(kind, {}).items() if text == name)
    return next((timing_in_words(kind, timing) for timing in found), "")
