"""Owns the widening of a function's floating dtypes, for a reference of a higher precision.

Knows nothing of schedules, compilation or inputs. A module is widened in its JSON, where each expression names its dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tvm

from kerneldecl.compiler.canonical import load, save

NARROW = frozenset({"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"})
_OPERANDS = ("a", "b", "value", "condition", "true_value", "false_value", "args")
"""Fields of expressions that hold operands."""
_LEAVES = frozenset({"ir.FloatImm", "ir.IntImm"})
"""Constants: their fields are numbers, not references to nodes."""
_COMPARISONS = frozenset({"prim.LT", "prim.LE", "prim.GT", "prim.GE", "prim.EQ", "prim.NE"})

Node = dict[str, Any]


def widened(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with its floating dtypes one size wider; itself where it reinterprets bits, whose width is fixed.

    Integers and conditions that are computed in floating point of axes alone, such as the coordinates of a resize, keep their dtypes:
    another rounding would move a `ceil`, and with it what is read.
    """
    saved = json.loads(save(mod))
    nodes: list[Node] = saved["nodes"]
    if any(node == {"type": "ir.Op", "data": "tirx.reinterpret"} for node in nodes):
        return mod
    types = [node["data"] for node in nodes if node["type"] == "ir.PrimType"]
    has_narrow = any(each["dtype"] in NARROW for each in types)
    wider = dict.fromkeys(NARROW, "float32") if has_narrow else {"float32": "float64"}
    _keep_coordinates(nodes)
    for each in types:  # those of coordinates came later
        each["dtype"] = wider.get(each["dtype"], each["dtype"])
    return load(json.dumps(saved))


def _keep_coordinates(nodes: list[Node]) -> None:
    """Give integers and conditions that are computed in floating point of axes alone operands with types of their own."""
    coordinates = _Coordinates(nodes)
    for node in list(nodes):
        fields = ("value",) if node["type"] == "prim.Cast" else ("a", "b") if node["type"] in _COMPARISONS else ()
        if fields and not coordinates.is_float(node) and all(coordinates.are_of_axes(node["data"][name]) for name in fields):
            node["data"].update({name: coordinates.copy(node["data"][name]) for name in fields})


class _Coordinates:
    """Finds expressions of axes alone among a module's nodes, and copies them with types that nothing else refers to."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._of_axes: dict[int, bool] = {}
        self._copies: dict[int, int] = {}

    def is_float(self, node: Node) -> bool:
        return "float" in str(self._nodes[node["data"]["ty"]]["data"].get("dtype", ""))

    def are_of_axes(self, at: int) -> bool:
        """Say whether an expression reads no data; a floating variable may hold some."""
        if at not in self._of_axes:
            node = self._nodes[at]
            is_data = node["type"] == "ir.TensorLoad" or (node["type"] == "ir.Var" and self.is_float(node))
            self._of_axes[at] = not is_data and all(self.are_of_axes(operand) for operand in self._operands(node))
        return self._of_axes[at]

    def _operands(self, node: Node) -> Iterator[int]:
        if node["type"] == "ffi.Array":
            yield from node["data"]
        elif isinstance(node.get("data"), Mapping) and node["type"] not in _LEAVES:
            yield from (node["data"][name] for name in _OPERANDS if isinstance(node["data"].get(name), int))

    def copy(self, at: int) -> int:
        """Return the position of a copy of an expression whose floating types are its own."""
        if at not in self._copies:
            self._copies[at] = self._copied(self._nodes[at], at)
        return self._copies[at]

    def _copied(self, node: Node, at: int) -> int:
        if node["type"] == "ffi.Array":
            return self._added({**node, "data": [self.copy(item) for item in node["data"]]})
        if node["type"] == "ir.PrimType":
            return self._added({**node, "data": dict(node["data"])})
        if not isinstance(node.get("data"), Mapping) or "ty" not in node["data"] or node["type"] == "ir.Var":
            return at
        data = {**node["data"], "ty": self.copy(node["data"]["ty"])}
        if node["type"] not in _LEAVES:
            data |= {name: self.copy(data[name]) for name in _OPERANDS if isinstance(data.get(name), int)}
        return self._added({**node, "data": data})

    def _added(self, node: Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1
