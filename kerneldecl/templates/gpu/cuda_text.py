"""Owns placeholders in CUDA text: names in braces, which values replace.

Knows nothing of kernels.
"""

from __future__ import annotations


def filled(text: str, **values: object) -> str:
    """Return a text with each value in the places of its name, `{name}`, a bool as CUDA writes it. All other braces stay as they are."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value).lower() if isinstance(value, bool) else str(value))
    return text
