"""Owns the error that a model cannot be read, and how errors of other libraries become part of its sentence.

Knows nothing of models or of formats.
"""

from __future__ import annotations


class ModelError(ValueError):
    """The user's file or attribute is no model, or none that TVM can import."""

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.hint = sentence, hint


def last_line(error: Exception) -> str:
    """Return the last line of an error's text, or its type where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
