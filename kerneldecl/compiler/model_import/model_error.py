"""Owns the error that a model cannot be read, and how errors of other libraries become part of its sentence.

Knows nothing of models or of formats.
"""

from __future__ import annotations

import re
import struct

import tvm


class ModelError(ValueError):
    """The user's file or attribute is no model, or none that TVM can import."""

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.hint = sentence, hint


IMPORT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    ImportError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    tvm.error.InternalError,
    tvm.error.OpError,
)
"""What TVM's importers, onnx and torch raise of a model that they cannot take: they have no class of their own for it."""


_OPERATOR = re.compile(r'ir\.Op\(span=.*?name="([\w.]+)".*?support_level=\d+\)')
_WIDTH = re.compile(r"\bT\.int64\((-?\d+)\)")
_OMITTED = "# Metadata omitted. Use show_meta=True in script() method to show it."


def last_line(error: Exception) -> str:
    """Return the last line of an error's text, with its type where the text alone says nothing."""
    text = _WIDTH.sub(r"\1", _OPERATOR.sub(r"\1", str(error)))  # an operator is printed with all that TVM knows of it
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("# from tvm")]
    if not lines:
        return type(error).__name__
    if _OMITTED in lines[-1]:  # a sentence of TVM's, with a script in it
        return " ".join(lines).replace(_OMITTED, "")[:300]
    return f"no {lines[-1]}" if isinstance(error, KeyError) else lines[-1][:300]
