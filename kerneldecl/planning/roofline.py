"""Owns what bounds an entry's kernel: its work and the device's rates.

Knows nothing of how it is shown.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from kerneldecl.planning.plan import EntryPlan


class Roofline(NamedTuple):
    """What bounds a kernel: its work, and the device's rates."""

    flops: float
    least_bytes: float
    peak_flops_per_s: float
    dram_bytes_per_s: float

    @property
    def least_secs(self) -> float:
        """The time that the device's peak and bandwidth allow at best: the longer of the two."""
        return max(self.flops / self.peak_flops_per_s, self.least_bytes / self.dram_bytes_per_s)


def roofline_of(entry: EntryPlan) -> Roofline:
    """Return what bounds a tuned entry's kernel."""
    assert entry.lowered is not None, "what is tuned is lowered"
    assert entry.tuned is not None, "it is tuned"
    # The rates of a detected machine were measured beside the kernel; of a declared one its file has the last word.
    peaks = entry.tuned.json.get("measured_peaks", {}) if entry.arch.is_detected else {}
    known = {field.name for field in dataclasses.fields(entry.arch.device)}
    device = dataclasses.replace(entry.arch.device, **{name: value for name, value in peaks.items() if name in known})
    peak = device.peak_flops_per_s(entry.lowered.dtype)
    return Roofline(entry.lowered.flops, entry.lowered.least_bytes, peak_flops_per_s=peak, dram_bytes_per_s=device.dram_bytes_per_s)


def roofline_share(entry: EntryPlan) -> float | None:
    """Return which share of its time a tuned entry's kernel would take at the device's peaks; None where it has no time."""
    assert entry.tuned is not None, "it is tuned"
    return roofline_of(entry).least_secs / entry.tuned.run_secs if entry.tuned.run_secs else None
