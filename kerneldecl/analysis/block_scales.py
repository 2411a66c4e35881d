"""Owns the blocks of float8 values that share a scale.

Knows nothing of TVM, instructions or how scales come about.
"""

from __future__ import annotations

BLOCK = 128
"""Elements along k that share a scale, and rows of operand B that do: those of one k-tile of 8 bits."""
DTYPES = ("float8_e4m3fn", "float8_e5m2")
