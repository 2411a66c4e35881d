"""Owns the workspace that tests of GPUs build in.

Knows nothing of what is tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_gpus import MODEL, put_nvcc
from support.repository import REPOSITORY
from support.spaces import Space


@pytest.fixture
def gpus(fakes: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    """Return a workspace whose one target is a GPU that no machine has, where an nvcc is the first on PATH."""
    text = (REPOSITORY / "kerneldecl/archs/h200.toml").read_text(encoding="utf-8")
    fakes.write({"archs/test-gpu.toml": text.replace('"NVIDIA H200"', f'"{MODEL}"')})
    fakes.edit("workloads.toml", 'arch = "test-cpu"', 'arch = "test-gpu"')
    put_nvcc(tmp_path / "bin", "13.0.88", monkeypatch)
    return fakes
