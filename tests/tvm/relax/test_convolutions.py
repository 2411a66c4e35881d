"""A deployed model of convolutions of sequences, images and volumes, and transposed ones, calls their kernels and is right."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.spaces import Space
from tvm import relax

from kerneldecl.arrays import relative_error
from kerneldecl.compiler.model_import import read_model
from kerneldecl.relax import TIR_PIPELINE, export_model, load_model, pipeline, target_of

torch = pytest.importorskip("torch", reason="models come from torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
HEAD = """\
edition = 1

[artifact]
name = "convolutions"
version = "1.0"

[target.host]
arch = "host"

[defaults]
top_k = 1
"""


class Upsampled(torch.nn.Module):  # type: ignore[misc]  # torch may be missing
    """A spectrogram of a sequence that is upsampled, and its frames as a volume: odd sizes, zeros on one side, strides of their own."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.causal, self.strided = nn.Conv1d(3, 12, 5), nn.Conv1d(12, 24, 3, stride=2, padding=1)
        self.up, self.grouped = nn.ConvTranspose2d(24, 18, 3, 2, 1, output_padding=1), nn.ConvTranspose2d(18, 6, 3, groups=2)
        self.volume = nn.Conv3d(1, 7, (3, 1, 3), stride=(2, 1, 1), padding=(1, 0, 1))

    def forward(self, x: Any) -> Any:
        of = torch.nn.functional
        hidden = of.gelu(self.causal(of.pad(x, (4, 0))))
        hidden = torch.relu(self.strided(hidden))
        image = hidden.reshape(1, 24, 3, 7)
        return torch.tanh(self.volume(self.grouped(torch.relu(self.up(image))).unsqueeze(1)))


@pytest.mark.slow
def test_a_deployed_model_computes_what_torch_does(tmp_path: Path) -> None:
    space, file = Space(tmp_path).write({"workloads.toml": HEAD}), tmp_path / "net.pt2"
    torch.manual_seed(0)
    model, x = Upsampled().eval(), torch.randn(1, 3, 41)
    torch.export.save(torch.export.export(model, (x,)), file)
    space.run("extract", "net.pt2")
    tables = {table["name"]: table for table in tomllib.loads(space.read("workloads.toml"))["workload"]}
    expected = {"causal": "conv1d", "strided": "conv1d", "up": "conv2d_transpose", "grouped": "tensor_ir", "volume": "conv3d"}
    assert {name: tables[name]["rule"] for name in expected} == expected
    space.run("build", "--jobs", "1")
    target = target_of(space.artifact())
    passes = pipeline(space.artifact(), target, "binary", strict=True)
    executable = relax.build(read_model.read_model(str(file)), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    export_model(executable, tmp_path / "net.so", space.artifact())
    found = load_model(tmp_path / "net.so")["main"](tvm.runtime.tensor(x.numpy()))
    found = found if isinstance(found, tvm.runtime.Tensor) else found[0]
    assert relative_error(found.numpy(), model(x).detach().numpy().astype(np.float64)) <= 1e-4
