"""Owns what a torch program computes of constants alone: causal masks, positions, rotary tables.

Knows nothing of TVM, nor of how values become a graph.
"""

from __future__ import annotations

import math
from typing import Any

LARGEST = 1 << 22
"""Elements of the largest value that is kept instead of its computation: a mask of 2048 by 2048."""


def constant_values(program: Any) -> dict[Any, Any]:
    """Return the tensor of each node that depends on no input and no parameter; torch itself computes them.

    Buffers that the program changes are inputs. Parameters are left alone: they are weights, with a name and a place.
    """
    import torch

    kinds = torch.export.graph_signature.InputKind
    changed = set(program.graph_signature.buffers_to_mutate.values())
    given = {**dict(program.named_buffers()), **program.constants}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    sources: dict[Any, Any] = {}
    known: dict[Any, Any] = {}
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                spec = specs[node.name]
                if spec.kind in {kinds.BUFFER, kinds.CONSTANT_TENSOR} and spec.target in given and spec.target not in changed:
                    sources[node] = given[spec.target]
            elif node.op == "call_function" and _is_known(node, sources | known):
                known[node] = node.target(*_values(node.args, sources | known), **_values(node.kwargs, sources | known))
    return {node: value for node, value in known.items() if isinstance(value, torch.Tensor)}


def _is_known(node: Any, values: dict[Any, Any]) -> bool:
    """Say whether a node is a function of known values, always the same, and its result small."""
    import torch
    from torch._ops import OpOverload

    value = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(value, torch.Tensor):
        return False
    is_pure = torch.Tag.nondeterministic_seeded not in node.target.tags  # run_decompositions leaves no operator that writes
    is_small = all(isinstance(extent, int) for extent in value.shape) and math.prod(value.shape) <= LARGEST
    return is_pure and is_small and all(arg in values for arg in node.all_input_nodes)


def _values(args: Any, values: dict[Any, Any]) -> Any:
    from torch import fx

    return fx.map_arg(args, lambda node: values[node])
