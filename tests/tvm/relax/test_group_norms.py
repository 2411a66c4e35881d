"""torch's group and instance norms in a diffusion model's residual block: one entry each, and a deployed block computes what torch does."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.spaces import Space
from support.thinned import at
from tvm import relax

from kerneldecl.arrays import relative_error
from kerneldecl.compiler.model_import import read_model
from kerneldecl.relax import TIR_PIPELINE, export_model, load_model, pipeline, target_of

torch = pytest.importorskip("torch", reason="models come from torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
HEAD = """\
edition = 1

[artifact]
name = "norms"
version = "1.0"

[target.host]
arch = "host"

[defaults]
top_k = 1
"""


class ResidualBlock(torch.nn.Module):  # type: ignore[misc]  # torch may be missing
    """A residual block as diffusion models have it, and instance norms behind it."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.norm1, self.conv1 = nn.GroupNorm(4, 16), nn.Conv2d(16, 24, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, 24), nn.Conv2d(24, 24, 3, padding=1)
        self.shortcut = nn.Conv2d(16, 24, 1)
        self.styled, self.plain = nn.InstanceNorm2d(24, affine=True), nn.InstanceNorm2d(24)
        for norm in (self.norm1, self.norm2, self.styled):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: Any) -> Any:
        hidden = self.conv1(torch.nn.functional.silu(self.norm1(x)))
        hidden = self.conv2(torch.nn.functional.silu(self.norm2(hidden))) + self.shortcut(x)
        return self.plain(torch.relu(self.styled(hidden)))


def saved(file: Path) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, x = ResidualBlock().eval(), torch.randn(2, 16, 8, 8)
    torch.export.save(torch.export.export(model, (x,)), file)
    return x.numpy(), model(x).detach().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", at({1}, ["", "float16"]))
def test_norms_are_entries_with_their_activations_in_the_layout_of_convolutions(dtype: str, tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": HEAD})
    saved(tmp_path / "block.pt2")
    space.run("extract", "block.pt2", *(["--dtype", dtype] if dtype else []))
    tables = tomllib.loads(space.read("workloads.toml"))["workload"]
    norms = {table["name"]: table for table in tables if table["rule"] == "group_norm"}
    assert {name: (norm["groups"], norm.get("activation", "")) for name, norm in norms.items()} == {
        "norm1": (4, "silu"), "norm2": (8, "silu"), "styled": (24, "relu"), "group_norm": (24, ""),
    }  # fmt: skip
    assert all(norm["axis"] == -1 for norm in norms.values())
    assert {table["rule"] for table in tables} == {"group_norm", "conv2d", "transpose"}
    transposes = [table for table in tables if table["rule"] == "transpose"]
    assert len(transposes) == 2, "of the image and of the result"


@pytest.mark.slow
def test_a_deployed_block_computes_what_torch_does(tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": HEAD})
    image, want = saved(tmp_path / "block.pt2")
    space.run("extract", "block.pt2")
    space.run("build")
    target = target_of(space.artifact())
    passes = pipeline(space.artifact(), target, "binary", strict=True)
    mod = read_model.read_model(str(tmp_path / "block.pt2"))
    executable = relax.build(mod, target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    export_model(executable, tmp_path / "block.so", space.artifact())
    found = load_model(tmp_path / "block.so")["main"](tvm.runtime.tensor(image))
    found = found if isinstance(found, tvm.runtime.Tensor) else found[0]
    assert relative_error(found.numpy(), want.astype(np.float64)) <= 1e-4
