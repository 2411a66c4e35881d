"""Owns how quantities are written: seconds, rates and bytes with a fitting unit, counts with a noun.

Knows nothing of what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_DURATIONS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def duration(secs: float) -> str:
    """Return seconds with three figures, such as `37.2 ms`; above a minute in whole seconds."""
    if secs >= 100:
        return f"{secs:.0f} s"
    # 999.6 us are a millisecond in three figures.
    for scale, unit in _DURATIONS:  # noqa: B007  the last one, where it is less than all
        if secs >= scale * 0.9995:
            break
    return f"{three_figures(secs / scale)} {unit}"


def amount(count: float, unit: str) -> str:
    """Return a count of a unit with three figures, such as `16.8 MFLOP`."""
    scale, prefix = next((each for each in _PREFIXES if count >= each[0] * 0.9995), (1.0, ""))
    return f"{three_figures(count / scale)} {prefix}{unit}"


def three_figures(value: float) -> str:
    """Return a number with three significant figures, without an exponent: 0.0123, 1.23, 12.3, 123, 1230."""
    if not value:
        return "0"
    text = f"{value:.3g}"
    return f"{float(text):.0f}" if "e+" in text else f"{value:#.3g}".rstrip(".")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 entry`, `2 entries`."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def share_of_peak(share: float | None) -> str:
    """Return a share of what the device's peaks allow; what takes less time than DRAM would has its operands in a cache."""
    return "" if share is None else f"{share:.0%}" if share <= 1 else ">100%"


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return sizes of dimensions as the command line takes them: batch=8, tokens=128."""
    return ", ".join(f"{dim}={size}" for dim, size in sizes.items())
