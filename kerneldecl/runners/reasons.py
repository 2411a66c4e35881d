"""Owns the line of an error's message that says what happened.

Knows nothing of what raised it. TVM's messages are long C++ traces with the reason in the last line; that of a launch which CUDA
refuses names CUDA's error one line before the grid.
"""

from __future__ import annotations

import re

_CUDA_ERROR = re.compile(r"CUDA_ERROR_\w+|cudaError\w+")


def reason_of(text: str) -> str:
    """Return the last line that is not blank, after the one that names CUDA's error where it does not itself; empty where there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    named = [line for line in lines if _CUDA_ERROR.search(line)]
    return lines[-1] if not named or named[-1] == lines[-1] else f"{named[-1]}: {lines[-1]}"
