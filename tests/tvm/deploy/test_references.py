"""Owns the test that a torch.export program is called with the arguments that it was exported with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
