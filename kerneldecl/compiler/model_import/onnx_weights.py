"""Owns the weights of an ONNX model that lie in files beside it.

Knows nothing of what they are used for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def load_weights(model: Any, folder: Path, largest: int | None = None) -> None:
    """Read weights of at most so many elements, or all, into the model; raise OSError or ValueError where a file lacks them."""
    from onnx import external_data_helper

    for tensor in _tensors(model.graph):
        if external_data_helper.uses_external_data(tensor) and (largest is None or math.prod(tensor.dims) <= largest):
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = tensor.DEFAULT
            del tensor.external_data[:]


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)
