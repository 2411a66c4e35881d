"""Owns the sizes of a model's dynamic dimensions: which it has, and the signature of a function where they are known.

Knows nothing of arrays, nor of what is done at these sizes.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kerneldecl.deploy.error import DeployError
from kerneldecl.relax.signature import signature_text

Sizes = Mapping[str, int]
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {"int32": int, "int64": int, "max": max, "min": min}


def dimensions(signature: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the dynamic dimensions of a function's inputs, in the order in which inputs have them."""
    texts = [extent for each in signature["inputs"] for extent in each["shape"] or () if isinstance(extent, str)]
    nodes = (node for text in texts for node in ast.walk(ast.parse(text, mode="eval")))
    return tuple(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name) and node.id != "T"))


def each_choice(name: str, signature: Mapping[str, Any], sizes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Yield every combination of the sizes of a function's dynamic dimensions; one without sizes where there are none.

    Raise DeployError where a dimension has no sizes, or a name is that of no dimension.
    """
    wanted = dimensions(signature)
    has = f"{', '.join(wanted)} of {signature_text(name, signature)}" if wanted else f"none: {signature_text(name, signature)}"
    if others := [dim for dim in sizes if dim not in wanted]:
        raise DeployError(f"--dim {others[0]}: the model has no such dynamic dimension", f"it has {has}")
    if missing := [dim for dim in wanted if dim not in sizes]:
        options = " ".join(f"--dim {dim}=8" for dim in missing)
        raise DeployError(f"{signature_text(name, signature)} has dynamic dimensions", f"choose their sizes for random inputs: {options}")
    for choice in itertools.product(*(sizes[dim] for dim in wanted)):
        yield dict(zip(wanted, choice, strict=True))


def sizes_of_shapes(signature: Mapping[str, Any], shapes: Sequence[Sequence[int] | None]) -> dict[str, int]:
    """Return the sizes of dimensions that the shapes of some inputs tell; None stands for an input without a shape yet."""
    described = (each["shape"] or () for each in signature["inputs"])
    pairs = (zip(extents, shape or (), strict=False) for extents, shape in zip(described, shapes, strict=True))
    return {extent: size for extent, size in itertools.chain.from_iterable(pairs) if isinstance(extent, str) and extent.isidentifier()}


def with_sizes(signature: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return a function's signature with the extents that are known at these sizes as numbers."""
    return {**signature, "inputs": [{**each, "shape": _known(each["shape"], sizes)} for each in signature["inputs"]]}


def _known(shape: Sequence[int | str] | None, sizes: Sizes) -> list[int | str] | None:
    return None if shape is None else [_extent(extent, sizes) for extent in shape]


def _extent(extent: int | str, sizes: Sizes) -> int | str:
    """Return an extent, such as n or (n + T.int64(1)) // T.int64(2), as a number; as it is where it cannot be computed."""
    if isinstance(extent, int):
        return extent
    try:
        return _value(ast.parse(extent, mode="eval").body, sizes)
    except (KeyError, ZeroDivisionError):
        return extent


def _value(node: ast.expr, sizes: Sizes) -> int:
    """Return the value of what TVM prints of an extent; raise KeyError for any other expression."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Call(func=ast.Attribute(attr=function), args=args):
            return _FUNCTIONS[function](*(_value(each, sizes) for each in args))
    raise KeyError(ast.dump(node))
