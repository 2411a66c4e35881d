"""Owns a kernel's arguments as values: names, extents, dtypes, and which of them are read, written or both.

Knows nothing of arrays, of how arguments are declared or passed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arg:
    """One argument of a kernel: its name, its extents, its dtype as TVM spells it."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Signature:
    """The arguments of a kernel in calling order: all inputs, then all outputs.

    The first `updated` outputs are input and output at once: they are `given` with content, and the kernel writes a part of them in place.
    The others are `made` whole.
    """

    inputs: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    updated: int = 0

    @property
    def args(self) -> tuple[Arg, ...]:
        return self.inputs + self.outputs

    @property
    def given(self) -> tuple[Arg, ...]:
        return self.inputs + self.outputs[: self.updated]

    @property
    def made(self) -> tuple[Arg, ...]:
        return self.outputs[self.updated :]
