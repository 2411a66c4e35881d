"""Owns placeholders in CUDA text: names in braces, which values replace.

Knows nothing of kernels.
"""

from __future__ import annotations


def filled(text: str, **values: object) -> str:
    """Return a text with each value in the places of its name: `{name}`. All other braces, of which CUDA has many, stay as they are."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return text
