"""The sweep over ONNX's node tests tells what is right from what is refused, and counts cases that TVM itself reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.onnx_sweep import ORDINARY, sweep, table

pytestmark = pytest.mark.slow


def test_a_case_is_right_and_one_is_refused_through_the_commands_that_users_run(tmp_path: Path) -> None:
    found = sweep(["test_abs", "test_cast_INT4_to_FLOAT", "test_det_2d"], tmp_path, 1)
    outcomes = {each.name: (each.outcome, each.tvm_reads) for each in found.verdicts}
    assert outcomes == {"test_abs": ("right", True), "test_cast_INT4_to_FLOAT": ("right", True), "test_det_2d": ("refused", False)}
    assert set(found.ends) <= ORDINARY
    assert "no converter for ONNX's operator Det\n     test_det_2d" in table(found)
