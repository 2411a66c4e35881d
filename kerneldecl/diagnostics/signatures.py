"""Owns how a kernel's arguments are written: proj(A: float32[8, 32], B: float32[64, 32]) -> C: float32[8, 64].

Knows nothing of kernels.
"""

from __future__ import annotations

from kerneldecl.signature import Arg, Signature


def type_text(arg: Arg) -> str:
    """Return an argument's type: float32[16, 64]."""
    return f"{arg.dtype}[{', '.join(map(str, arg.shape))}]"


def signature_text(name: str, signature: Signature) -> str:
    """Return a kernel's arguments as one would declare them: what it is given before the arrow, with ! what it updates in place."""
    inputs, outputs = ([f"{arg.name}: {type_text(arg)}" for arg in side] for side in (signature.inputs, signature.outputs))
    updated = [f"{text}!" for text in outputs[: signature.updated]]
    return f"{name}({', '.join([*inputs, *updated])}) -> {', '.join(outputs[signature.updated :]) or 'None'}"
