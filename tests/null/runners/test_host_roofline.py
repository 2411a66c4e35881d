"""How much memory is copied to measure a CPU's bandwidth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kerneldecl.hardware.host import detect
from kerneldecl.runners.host_roofline import LEAST_COPIED_BYTES, MOST_COPIED_BYTES, copied_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("l3_bytes", "expected"),
    [(0, LEAST_COPIED_BYTES), (8 * MIB, LEAST_COPIED_BYTES), (33 * MIB, 66 * MIB), (504 * MIB, MOST_COPIED_BYTES)],
)
def test_copies_are_beyond_the_last_level_cache_within_limits(l3_bytes: int, expected: int) -> None:
    assert copied_bytes(replace(detect().the_cpu, l3_bytes=l3_bytes)) == expected
