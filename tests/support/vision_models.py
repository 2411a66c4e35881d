"""Owns torchvision's networks for tests: networks with settled batch norms, and their files.

Knows nothing of what is tested.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def torchvision_models() -> Any:
    """Return torchvision.models; skip the test where torch or torchvision is not installed."""
    pytest.importorskip("torch", reason="models come from torch")
    from bench_support.models import torchvision_here

    try:
        return torchvision_here.torchvision_models()
    except ImportError as error:
        pytest.skip(str(error), allow_module_level=True)


def vision_model(name: str) -> Any:
    """Return a network with random weights, whose batch norms do something."""
    import torch

    torch.manual_seed(0)
    network = getattr(torchvision_models(), name)(num_classes=10).eval()
    for layer in network.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 1.5)
            layer.weight.data.uniform_(0.5, 1.5)
            layer.bias.data.normal_(0, 0.1)
    return network


def saved_model(name: str, file: Path, pixels: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Save a network as torch.export program or ONNX, by the file's ending; return an input and what torch computes of it."""
    network = vision_model(name)
    import torch

    image = torch.randn(1, 3, pixels, pixels)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, of its exporters
        if file.suffix == ".onnx":
            torch.onnx.export(network, (image,), str(file), dynamo=False)
        else:
            torch.export.save(torch.export.export(network, (image,)), file)
        return image.numpy(), network(image).numpy()
