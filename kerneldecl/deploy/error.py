"""Owns the error about a model, its inputs or what it is compared with, as a sentence for the user.

Knows nothing of where it is raised.
"""

from __future__ import annotations


class DeployError(ValueError):
    """What the user gave cannot be used: what is the case, and the way out."""

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(f"{sentence}; {hint}" if hint else sentence)
        self.sentence, self.hint = sentence, hint
