"""Convolutions of sequences, images and volumes, and transposed ones, are entries of their rules; what no rule takes stays and is right."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tvm
from support.graphs import TARGET
from support.in_this_process import InThisProcess
from support.spaces import Space
from support.thinned import at
from tvm import relax

from kerneldecl.arrays import relative_error
from kerneldecl.compiler.graph.pipeline import graph_passes
from kerneldecl.compiler.model_import import read_model
from kerneldecl.extract.extract import extract_model

torch = pytest.importorskip("torch", reason="models come from torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
nn = torch.nn


def extracted(folder: Path, *layers: Any, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the entries of layers by torch, without names, once what the model's passes make of them computes what torch does."""
    torch.manual_seed(0)
    model, x, file = nn.Sequential(*layers).eval(), torch.randn(shape), folder / "net.pt2"
    for norm in (each for each in model if isinstance(each, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))):
        for values in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            nn.init.uniform_(values, 0.5, 1.5)
    torch.export.save(torch.export.export(model, (x,)), file)
    mod = tvm.transform.Sequential(list(graph_passes()))(read_model.read_model(str(file)))
    found = relax.VirtualMachine(relax.build(mod, TARGET), tvm.cpu())["main"](tvm.runtime.tensor(x.numpy()))
    found = found if isinstance(found, tvm.runtime.Tensor) else found[0]
    assert relative_error(found.numpy(), model(x).detach().numpy().astype(np.float64)) <= 1e-5
    with mock.patch("kerneldecl.extract.extract.Worker", InThisProcess):
        extract_model(str(file), Space(folder).root)
    tables = tomllib.loads((folder / "workloads.toml").read_text())["workload"]
    return [{key: value for key, value in table.items() if key not in {"name", "tags"}} for table in tables]


def convolutions(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [table for table in tables if table["rule"].startswith("conv")]


def of(tables: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(table.get(name) for name in ("rule", *names)) for table in convolutions(tables)]


def test_sequences_are_convolved_by_rule_conv1d(tmp_path: Path) -> None:
    layers = nn.Conv1d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 10, 5, stride=2, dilation=2, groups=2)
    tables = extracted(tmp_path, *layers, shape=(2, 6, 23))
    sizes = {"n": 2, "w": 23}
    assert convolutions(tables) == [
        {"rule": "conv1d", **sizes, "c": 6, "f": 8, "kw": 3, "padding": 1, "epilogue": ["bias", "relu"]},
        {"rule": "conv1d", **sizes, "c": 8, "f": 10, "kw": 5, "stride": 2, "dilation": 2, "groups": 2, "epilogue": ["bias"]},
    ]
    assert [table["rule"] for table in tables if table not in convolutions(tables)] == ["transpose"] * 2, "of the input and of the result"


@pytest.mark.parametrize(
    ("layers", "names", "expected"),
    at(
        {1},
        [
            # zeros on one side
            ((nn.ConstantPad1d((4, 0), 0.0), nn.Conv1d(6, 8, 5), nn.SiLU()), ("pads", "epilogue"), ("conv1d", [4, 0], ["bias", "silu"])),
            # depthwise, and a batch norm
            ((nn.Conv1d(6, 6, 3, groups=6), nn.BatchNorm1d(6), nn.GELU()), ("groups", "epilogue"), ("conv1d", 6, ["bias", "gelu"])),
            ((nn.Conv1d(6, 8, 1, bias=False),), ("epilogue",), ("conv1d", None)),
        ],
    ),
)
def test_what_is_around_a_convolution_of_sequences_is_its_own(
    layers: tuple[Any, ...], names: tuple[str, ...], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    assert of(extracted(tmp_path, *layers, shape=(1, 6, 17)), *names) == [expected]


class Normed(torch.nn.Module):  # type: ignore[misc]  # torch may be missing
    """Layer norms of the channels of a sequence, as speech models have them between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(6, 8, 3), nn.LayerNorm(8), nn.Conv1d(8, 6, 3)

    def forward(self, x: Any) -> Any:
        rows = self.norm(self.first(x).transpose(1, 2))
        return self.second(torch.nn.functional.gelu(rows.transpose(1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "between"),
    at({0}, [((Normed,), "layer_norm"), ((lambda: nn.Conv1d(6, 8, 3), lambda: nn.MaxPool1d(2), lambda: nn.Conv1d(8, 4, 3)), "tensor_ir")]),
    ids=["layer norms", "pooling"],
)
def test_between_convolutions_of_sequences_nothing_is_transposed(layers: Any, between: str, tmp_path: Path) -> None:
    tables = extracted(tmp_path, *(layer() for layer in layers), shape=(2, 6, 23))
    assert of(tables, "epilogue") == [("conv1d", ["bias"])] * 2
    rules = Counter(table["rule"] for table in tables)
    assert rules["transpose"] == 2, "of the input and of the result"
    assert rules[between] == 1


def test_images_are_upsampled_by_rule_conv2d_transpose(tmp_path: Path) -> None:
    layers = nn.ConvTranspose2d(6, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 5, 3, 2, 1, output_padding=1)
    tables = extracted(tmp_path, *layers, nn.Conv2d(5, 4, 3), shape=(2, 6, 7, 5))
    first = {"n": 2, "h": 7, "w": 5, "c": 6, "f": 8, "kh": 4, "kw": 4, "stride": 2, "padding": 1, "epilogue": ["bias", "relu"]}
    assert convolutions(tables)[0] == {"rule": "conv2d_transpose", **first}
    assert of(tables, "extra", "epilogue") == [
        ("conv2d_transpose", None, ["bias", "relu"]), ("conv2d_transpose", 1, ["bias"]), ("conv2d", None, ["bias"]),
    ]  # fmt: skip
    assert [table["rule"] for table in tables if table not in convolutions(tables)] == ["transpose"] * 2


@pytest.mark.slow
def test_a_batch_norm_goes_into_a_transposed_convolution(tmp_path: Path) -> None:
    layers = nn.ConvTranspose2d(6, 8, 2, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    assert of(extracted(tmp_path, *layers, shape=(1, 6, 5, 3)), "epilogue") == [("conv2d_transpose", ["bias", "relu"])]


@pytest.mark.parametrize(
    "options",
    at({0}, [{"groups": 2}, {"dilation": 2}, {"stride": (2, 1)}, {"stride": 2, "padding": (1, 0)}, {"padding": 3, "stride": 2}]),
)
def test_transposed_convolutions_that_the_rule_does_not_take_stay(options: dict[str, Any], tmp_path: Path) -> None:
    layers = nn.Conv2d(6, 6, 3), nn.ConvTranspose2d(6, 8, 3, **options), nn.BatchNorm2d(8), nn.ReLU()
    tables = extracted(tmp_path, *layers, shape=(1, 6, 9, 7))
    assert of(tables) == [("conv2d",)]
    assert "tensor_ir" in {table["rule"] for table in tables}


@pytest.mark.slow
def test_transposed_convolutions_of_sequences_have_no_rule(tmp_path: Path) -> None:
    assert of(extracted(tmp_path, nn.ConvTranspose1d(3, 8, 4, 2, 1), nn.BatchNorm1d(8), shape=(1, 3, 9))) == []


@pytest.mark.slow
def test_volumes_are_convolved_by_rule_conv3d(tmp_path: Path) -> None:
    first = nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2)
    second = nn.Conv3d(8, 4, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1), bias=False)
    tables = extracted(tmp_path, *first, second, shape=(1, 3, 6, 9, 8))
    assert of(tables, "d", "h", "w", "padding", "strides", "pads", "epilogue") == [
        ("conv3d", 6, 9, 8, 1, None, None, ["bias", "relu"]),
        ("conv3d", 3, 4, 4, None, [1, 2, 2], [0, 1, 1, 0, 1, 1], None),
    ]


@pytest.mark.slow
def test_a_stride_for_each_side_of_an_image_is_the_rules(tmp_path: Path) -> None:
    tables = extracted(tmp_path, nn.Conv2d(3, 8, 3, stride=(2, 1), dilation=(1, 2)), shape=(1, 3, 9, 8))
    assert of(tables, "strides", "dilations") == [("conv2d", [2, 1], [1, 2])]
