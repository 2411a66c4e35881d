"""Owns the equivalence of a model's function and a kernel's: literals' widths and the order of commutative operands are ignored.

Knows nothing of artifacts, nor of keys, under which equivalent functions differ.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from kerneldecl.compiler.canonical import canonical_lines, canonical_module, code_lines
from kerneldecl.store.keys import digest

_WIDTH = re.compile(r"T\.int(?:32|64)\((-?\d+)\)")
_EXTENT = re.compile(r'TypeVar\("[^"\n]*"\)')
"""The definition of an extent that is known when a function is called, with its name as a string."""
_OPERATORS = {ast.Add: "+", ast.Mult: "*"}
_FUNCTIONS = ("max", "min", "reads")
"""Functions of T whose arguments may stand in any order. T.reads lists regions in the order of the block's expressions."""


def match_digest(func: Any) -> str:
    """Return the digest that a function of a model shares with the kernels that compute the same.

    Both operands of an operation have one dtype, which the other operand or the buffer gives; so literal integers need no width.
    """
    lines = canonical_lines(_EXTENT.sub("TypeVar()", without_widths(line)) for line in code_lines(canonical_module(func)))
    return digest("\n".join(map(ordered, lines)).encode())


def without_widths(text: str) -> str:
    """Return a script's text with literal integers written as plain numbers."""
    return _WIDTH.sub(r"\1", text)


def ordered(line: str) -> str:
    """Return a line of a canonical script with operands of +, *, max and min sorted; a line that is not a whole statement stays."""
    text = line.strip()
    try:
        (statement,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return line
    indent = line[: len(line) - len(line.lstrip())]  # the block that a statement belongs to
    return indent + _rendered(statement, text) if text.isascii() else line


def _rendered(node: Any, text: str) -> str:
    """Return the text of a node, with its child nodes rendered."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        sides = sorted(f"({_rendered(side, text)})" for side in (node.left, node.right))
        return f"({f' {_OPERATORS[type(node.op)]} '.join(sides)})"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"T.{name}" for name in _FUNCTIONS}:
        return f"{ast.unparse(node.func)}({', '.join(sorted(_rendered(arg, text) for arg in node.args))})"
    parts, at = [], node.col_offset
    inner: list[Any] = [child for child in ast.iter_child_nodes(node) if hasattr(child, "col_offset")]
    for child in sorted(inner, key=lambda each: each.col_offset):
        parts += [text[at : child.col_offset], _rendered(child, text)]
        at = child.end_col_offset
    return "".join([*parts, text[at : node.end_col_offset]])
