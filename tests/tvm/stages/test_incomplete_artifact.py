"""Owns the test of an artifact that lacks an entry, as users build, verify and load it.

Knows nothing of how it is linked: tests/null/stages has each case of that.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.spaces import REAL, Space

import kerneldecl


@pytest.mark.slow
def test_the_other_kernels_can_be_used_and_the_missing_one_says_why(tmp_path: Path) -> None:
    space = Space(tmp_path).write(REAL)
    space.edit("templates/plain.py", "    sch = ", "    if len(mod['main'].params) == 3:\n        return None\n    sch = ")
    built = space.run("build", "--jobs", "1", code=1)
    reason = "none of 2 candidates passed: the template does not apply"
    assert f"failed gemm@host: {reason}" in built.stdout
    assert "without the failed entries" in built.stdout
    verified = space.run("verify").stdout
    assert f"missing  gemm  {reason}" in verified
    assert "1 of 1 kernels correct" in verified
    artifact = kerneldecl.load(space.artifact())
    assert set(artifact) == {"relu"}
    x, y = np.float32([[-1.0, 2.0] * 16] * 24), np.empty((24, 32), np.float32)
    artifact["relu"](x, y)
    assert (y == np.maximum(x, 0)).all()
    with pytest.raises(KeyError, match=f"linked without it: {reason}"):
        artifact["gemm"]
