"""Owns where the repository is.

Knows nothing of what is in it.
"""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
