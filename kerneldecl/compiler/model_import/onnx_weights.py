"""Owns the weights of an ONNX model that lie in files beside it.

Knows nothing of what they are used for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kerneldecl.compiler.model_import.onnx_types import graphs_of


def load_weights(model: Any, folder: Path, largest: int | None = None) -> None:
    """Read weights of at most so many elements, or all, into the model; raise OSError or ValueError where a file lacks them."""
    from onnx import external_data_helper

    for tensor in tensors_of(model.graph):
        if external_data_helper.uses_external_data(tensor) and (largest is None or math.prod(tensor.dims) <= largest):
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = tensor.DEFAULT
            del tensor.external_data[:]


def tensors_of(graph: Any) -> Iterator[Any]:
    """Yield a graph's weights and the constants of its nodes, those of inner graphs among them."""
    for each in graphs_of(graph):
        yield from each.initializer
        yield from (attribute.t for node in each.node for attribute in node.attribute if attribute.HasField("t"))
