"""Owns the tests of what a compiled model is compared on: arguments as a program was exported with, inputs of static shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kerneldecl.deploy.error import DeployError
from kerneldecl.deploy.inputs import random_input
from kerneldecl.deploy.references import torch_program

torch = pytest.importorskip("torch", reason="torch programs need torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of its own deprecated functions


class _Nested(torch.nn.Module):  # type: ignore[misc]  # torch may be missing
    """Inputs in a dict, given by name alone."""

    def forward(self, x: Any, *, extra: dict[str, Any]) -> dict[str, Any]:
        return {"y": x * extra["scale"] + extra["shift"]}


def test_tensors_go_where_they_stood_when_the_program_was_exported(tmp_path: Path) -> None:
    x, extra = torch.ones(2, 3), {"scale": torch.full((3,), 2.0), "shift": torch.full((3,), 5.0)}
    torch.export.save(torch.export.export(_Nested(), (x,), {"extra": extra}), tmp_path / "nested.pt2")
    (y,) = torch_program(str(tmp_path / "nested.pt2"))([each.numpy() for each in (x, *extra.values())])
    np.testing.assert_array_equal(y, np.full((2, 3), 7, np.float32))


def test_an_input_of_a_shape_that_nothing_tells_says_which_command_takes_a_file() -> None:
    with pytest.raises(DeployError) as found:
        random_input({"name": "x", "shape": None, "dtype": "float32"}, "0")
    assert found.value.hint.startswith("`kerneldecl run` takes --input FILE.npy")
