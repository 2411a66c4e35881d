"""The kernel that docs/guides/wgmma.md writes by hand gives the right result where the emulator runs it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import EmulationError, emulate
from support.compilers import needs_nvcc
from support.documents import blocks
from support.repository import REPOSITORY

from kerneldecl.compiler.canonical import lower
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch, load_rule

pytestmark = needs_nvcc
PAGE = REPOSITORY / "docs/guides/wgmma.md"


def _module(folder: Path, before: str = "", after: str = "") -> Any:
    code = next(block.code for block in blocks(PAGE.read_text(encoding="utf-8")) if block.noted == "kernels/gemm.py")
    assert before in code
    path = folder / "gemm.py"
    path.write_text(code.replace(before, after) if before else code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("documented_gemm", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _kernel(module: Any, m: int, n: int, k: int) -> Any:
    """Return what the file's `specialize` gives for the computation on an H200."""
    rule = load_rule(STANDARD, "matmul").of(STANDARD, {"m": m, "n": n, "k": k, "layout": "nt", "dtype": "float16"})
    return module.specialize(lower(rule), load_arch(STANDARD, "h200"))


def _operands(m: int, n: int, k: int) -> tuple[Any, Any, Any]:
    drawn = np.random.default_rng(0)
    return (
        drawn.standard_normal((m, k)).astype("float16"),
        drawn.standard_normal((n, k)).astype("float16"),
        np.full((m, n), np.nan, "float16"),
    )


def test_the_kernel_by_hand_is_right(tmp_path: Path) -> None:
    a, b, c = _operands(128, 128, 384)
    *_, found = emulate(_kernel(_module(tmp_path), 128, 128, 384), a, b, c)
    np.testing.assert_allclose(found.astype("float32"), a.astype("float32") @ b.astype("float32").T, rtol=2e-3, atol=4e-3)


def test_a_wait_that_is_left_out_is_named(tmp_path: Path) -> None:
    wrong = _module(tmp_path, "full.wait(reading.stage, reading.phase)", "pass")
    with pytest.raises(EmulationError, match=r"nobody has written|still fills"):
        emulate(_kernel(wrong, 128, 64, 384), *_operands(128, 64, 384))


def test_other_archs_get_no_kernel(tmp_path: Path) -> None:
    module = _module(tmp_path)
    assert module.specialize(None, load_arch(STANDARD, "a100-80gb")) is None
    assert module.specialize(None, load_arch(STANDARD, "x86-64-v3")) is None
