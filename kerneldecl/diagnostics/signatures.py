"""Owns how a kernel's arguments are written: proj(A: float32[8, 32], B: float32[64, 32]) -> C: float32[8, 64].

Knows nothing of kernels.
"""

from __future__ import annotations

from kerneldecl.model import Arg, Signature


def type_text(arg: Arg) -> str:
    """Return an argument's type: float32[16, 64]."""
    return f"{arg.dtype}[{', '.join(map(str, arg.shape))}]"


def signature_text(name: str, signature: Signature) -> str:
    """Return a kernel's arguments as one would declare them, inputs before the arrow."""
    inputs, outputs = (", ".join(f"{arg.name}: {type_text(arg)}" for arg in side) for side in (signature.inputs, signature.outputs))
    return f"{name}({inputs}) -> {outputs}"
