"""Owns the comparison of two functions: each as the sequence of its loop nests, and their first difference as a sentence.

Knows nothing of artifacts, modules or which functions are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kerneldecl.compiler.canonical import canonical_lines, canonical_module, nests, signature_of
from kerneldecl.compiler.equivalence import without_widths

_VALUE = re.compile(r'(?P<dtype>"[a-z]+\d\w*"|(?<=T\.)(?:b?float|u?int)\d\w*(?=\())|(?<![\w.])(?P<number>\d[\w.]*)')
_INDICES = re.compile(r"\[([^\[\]]*)\]")
_BLOCK = re.compile(r'T\.sblock\("(?P<name>[^"]+)"\)')


@dataclass(frozen=True)
class Nest:
    """One outermost loop nest: its canonical text without extents and dtypes, and these."""

    blocks: tuple[str, ...] = field(compare=False)
    """Names of the blocks, as the author chose them."""
    form: str
    values: tuple[str, ...]

    @property
    def unordered(self) -> str:
        """The form with the indices of every access sorted."""
        return _INDICES.sub(lambda found: f"[{', '.join(sorted(found[1].split(', ')))}]", self.form)


@dataclass(frozen=True)
class Shape:
    """A function's arguments and loop nests."""

    args: tuple[tuple[tuple[int, ...], str], ...]
    """Extents and dtype of each argument: inputs, then outputs."""
    nests: tuple[Nest, ...]


@dataclass(frozen=True)
class Difference:
    """The first difference of a function from a kernel that is close to it."""

    kind: str
    """dtype, shape, computation, fused epilogue or layout."""
    sentence: str
    rank: int
    """Distance of the two: less is closer."""


def shape_of(func: Any) -> Shape:
    """Return a function's arguments and loop nests; raise as `signature_of` does."""
    return Shape(tuple(signature_of(func)), tuple(_nests(func)))


def _nests(func: Any) -> Iterator[Nest]:
    for nest in nests(canonical_module(func)):
        lines = [without_widths(line) for line in nest]
        text = "\n".join(canonical_lines(lines))
        blocks = tuple(found["name"] for found in _BLOCK.finditer("\n".join(lines)))
        values = tuple(found[0] for found in _VALUE.finditer(text))
        yield Nest(blocks, _VALUE.sub(lambda found: "dtype" if found["dtype"] else "number", text), values)


def difference(func: Shape, kernel: Shape) -> Difference | None:
    """Return the first difference of a function from a kernel: dtype, shape, epilogue, layout; None where nothing is in common."""
    shared = min(len(func.nests), len(kernel.nests))
    if len(func.nests) != len(kernel.nests):
        return _epilogue_difference(func, kernel, shared) if shared and func.nests[:shared] == kernel.nests[:shared] else None
    if len(func.args) != len(kernel.args):
        return None
    if _forms(func) == _forms(kernel):
        return _value_difference(func, kernel)
    same_but_for_indices = [nest.unordered for nest in func.nests] == [nest.unordered for nest in kernel.nests]
    return _layout_difference(func, kernel) if same_but_for_indices else None


def _forms(shape: Shape) -> list[str]:
    return [nest.form for nest in shape.nests]


def _value_difference(func: Shape, kernel: Shape) -> Difference:
    pairs = list(enumerate(zip(func.args, kernel.args, strict=True)))
    dtypes = [f"argument {at} is {f[1]}, the kernel's is {k[1]}" for at, (f, k) in pairs if f[1] != k[1]]
    shapes = [f"argument {at} is {_extents(f[0])}, the kernel's is {_extents(k[0])}" for at, (f, k) in pairs if f[0] != k[0]]
    if dtypes:
        return Difference("dtype", dtypes[0], len(dtypes) + len(shapes))
    if shapes:
        return Difference("shape", shapes[0], len(shapes))
    return Difference("computation", "a constant, or the dtype of an intermediate, is another one", 1)


def _epilogue_difference(func: Shape, kernel: Shape, shared: int) -> Difference:
    rest = len(func.nests) + len(kernel.nests) - 2 * shared
    if len(func.nests) > shared:
        return Difference("fused epilogue", f"the function continues with {_names(func.nests[shared:])}, the kernel does not", rest)
    return Difference("fused epilogue", f"the kernel continues with {_names(kernel.nests[shared:])}, the function does not", rest)


def _layout_difference(func: Shape, kernel: Shape) -> Difference:
    pairs = enumerate(zip(func.args, kernel.args, strict=True))
    moved = [f"argument {at} is {_extents(f[0])}, the kernel's is {_extents(k[0])}, with other indices" for at, (f, k) in pairs if f != k]
    return Difference("layout", moved[0] if moved else "the indices of an access stand in another order", len(moved) + 1)


def _names(nests: tuple[Nest, ...]) -> str:
    return ", ".join(name for nest in nests for name in nest.blocks)


def _extents(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
