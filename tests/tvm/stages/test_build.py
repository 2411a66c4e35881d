"""Owns the tests of real builds: kernels that are correct for any array that fits, and refuse the others.

Knows nothing of how kernels are scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.spaces import REAL, Space

import kerneldecl
from kerneldecl.artifact.load import Artifact
from kerneldecl.errors import ArtifactError

RNG = np.random.default_rng(7)
AUTO = """
[[workload]]
name = "vectors"
rule = "elementwise"
op = "add"
shape = [64, 64]
policy = "auto"

[[workload]]
name = "sums"
rule = "reduce"
op = "sum"
shape = [33, 130]
axes = [-1]
policy = "auto"

[[workload]]
name = "square"
rule = "matmul"
m = 64
n = 64
k = 64
policy = "auto"

[[workload]]
name = "layer"
rule = "matmul"
m = 16
n = 24
k = 32
epilogue = ["bias", "relu"]
policy = "auto"

[[workload]]
name = "halves"
rule = "elementwise"
op = "gelu"
dtype = "bfloat16"
shape = [8, 40]
policy = "auto"
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    space = Space(tmp_path_factory.mktemp("auto")).write({**REAL, "workloads.toml": REAL["workloads.toml"] + AUTO})
    space.run_here("build", "--jobs", "1")
    return kerneldecl.load(space.artifact())


def at(offset_bytes: int, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a copy of the array at an address so many bytes after a multiple of 64."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset_bytes
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    assert copy.ctypes.data % 64 == offset_bytes
    return copy


def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return RNG.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("offset_bytes", range(0, 64, 4))
def test_kernels_take_arrays_at_any_address(artifact: Artifact, offset_bytes: int) -> None:
    a, b, out = at(offset_bytes, normal(64, 64)), at(60 - offset_bytes, normal(64, 64)), at(offset_bytes, normal(64, 64))
    artifact["vectors"](a, b, out)
    np.testing.assert_array_equal(out, a + b)
    artifact["square"](a, b, out)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-4)
    rows, sums = at(offset_bytes, normal(33, 130)), at(4, normal(33))
    artifact["sums"](rows, sums)
    np.testing.assert_allclose(sums, rows.sum(axis=1, dtype=np.float64), rtol=1e-4, atol=1e-4)


def test_bfloat16_arrays_of_ml_dtypes_are_accepted(artifact: Artifact) -> None:
    x = normal(8, 40).astype(ml_dtypes.bfloat16)
    out = np.full((8, 40), np.nan, ml_dtypes.bfloat16)
    artifact["halves"](x, out)
    wide = x.astype(np.float64)
    want = 0.5 * wide * (1 + np.vectorize(__import__("math").erf)(wide / 2**0.5))
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2e-2, atol=2e-2)


def test_an_epilogue_is_part_of_the_kernel(artifact: Artifact) -> None:
    a, b, bias, out = normal(16, 32), normal(32, 24), normal(24), normal(16, 24)
    artifact["layer"](a, b, bias, out)
    np.testing.assert_allclose(out, np.maximum(a.astype(np.float64) @ b + bias, 0), rtol=1e-4, atol=1e-5)


WRONG: dict[str, Callable[[], list[np.ndarray[Any, Any]]]] = {
    "dtype of an input": lambda: [normal(24, 32).astype(np.float64), normal(24, 32)],
    "dtype of the output": lambda: [normal(24, 32), normal(24, 32).astype(np.int32)],
    "extent": lambda: [normal(24, 31), normal(24, 32)],
    "order of extents": lambda: [normal(32, 24), normal(24, 32)],
    "number of dimensions": lambda: [normal(24 * 32), normal(24, 32)],
    "too few": list,
    "too many": lambda: [normal(24, 32)] * 3,
    "strides": lambda: [normal(24, 64)[:, ::2], normal(24, 32)],
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_that_do_not_fit_are_refused(artifact: Artifact, what: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        artifact["relu"](*WRONG[what]())


def test_an_unknown_name_is_reported_with_the_known_ones(artifact: Artifact) -> None:
    with pytest.raises(KeyError, match=r"relu, .*it holds|it holds .*relu"):
        artifact["Relu"]
    assert set(artifact) == {"add[shape=24x32]", "add[shape=7x9]", "relu", "gemm", "vectors", "sums", "square", "layer", "halves"}
    assert len(artifact) == 9


def test_an_artifact_that_was_changed_is_not_loaded(real: Space) -> None:
    library = next(real.artifact().glob("lib/*.so"))
    library.write_bytes(library.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match="has other content than its manifest says"):
        kerneldecl.load(real.artifact())
