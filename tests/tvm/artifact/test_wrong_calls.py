"""Owns the tests that a wrong call and a broken artifact are each answered by one sentence with the place and the way out.

Knows nothing of how kernels are built; `tests/null/test_mistakes.py` has the other mistakes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.spaces import Space

import kerneldecl
from kerneldecl.artifact.load import Artifact
from kerneldecl.errors import ArtifactError

SIGNATURE = "expected gemm(A: float32[16, 32], B: float32[32, 24]) -> C: float32[16, 24]"


@pytest.fixture(scope="module")
def artifact(built_real: Space) -> Artifact:
    return kerneldecl.load(built_real.artifact())


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


def read_only() -> np.ndarray[Any, Any]:
    found = zeros(16, 24)
    found.setflags(write=False)
    return found


A, B = zeros(16, 32), zeros(32, 24)
CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception], str, str]] = {
    "nothing": (lambda f: f(), TypeError, "0 arrays given", "pass 2, or 3 with the outputs to write"),
    "an input too few": (lambda f: f(A), TypeError, "1 array given", "pass 2, or 3 with the outputs to write"),
    "an array too many": (lambda f: f(A, B, zeros(16, 24), A), TypeError, "4 arrays given", "pass 2, or 3"),
    "an input by name": (lambda f: f(A, B=B), TypeError, "B is given by name", SIGNATURE),
    "another extent": (lambda f: f(zeros(8, 32), B), ValueError, "A is float32[8, 32]", SIGNATURE),
    "another rank": (lambda f: f(zeros(32), B), ValueError, "A is float32[32]", SIGNATURE),
    "inputs changed over": (lambda f: f(B, A), ValueError, "A is float32[32, 24]", SIGNATURE),
    "NumPy's own dtype": (lambda f: f(A.astype("float64"), B), TypeError, "A is float64[16, 32]", SIGNATURE),
    "complex numbers": (lambda f: f(A.astype("complex64"), B), TypeError, "A has a dtype that no kernel takes (complex64)", SIGNATURE),
    "objects": (lambda f: f(A.astype("object"), B), ValueError, "A cannot be shared by DLPack", SIGNATURE),
    "no rows": (lambda f: f(A[:0], B), ValueError, "A is float32[0, 32]", SIGNATURE),
    "a mapping": (lambda f: f({"A": A}, B), TypeError, "A is of type dict, which is no array", SIGNATURE),
    "rows from the last": (lambda f: f(A[::-1], B), ValueError, "A is not contiguous", "pass a contiguous copy"),
    "an output of another dtype": (lambda f: f(A, B, zeros(16, 24, dtype="float64")), TypeError, "C is float64[16, 24]", SIGNATURE),
    "an output by name": (lambda f: f(A, B, out=zeros(16, 24)), TypeError, "out is given by name", SIGNATURE),
    "half": (lambda f: f(A, B.astype("float16")), TypeError, "B is float16[32, 24]", SIGNATURE),
    "a number": (lambda f: f(1, B), TypeError, "A is of type int, which is no array", SIGNATURE),
    "a list": (lambda f: f([[1.0]], B), TypeError, "A is of type list, which is no array", SIGNATURE),
    "none": (lambda f: f(A, None), TypeError, "B is of type NoneType, which is no array", SIGNATURE),
    "every other column": (lambda f: f(A, zeros(32, 48)[:, ::2]), ValueError, "B is not contiguous", "pass a contiguous copy"),
    "Fortran's order": (lambda f: f(np.asfortranarray(A), B), ValueError, "A is not contiguous", "pass a contiguous copy"),
    "another byte order": (lambda f: f(A.astype(">f4"), B), ValueError, "A cannot be shared by DLPack", SIGNATURE),
    "an output of another shape": (lambda f: f(A, B, zeros(16, 16)), ValueError, "C is float32[16, 16]", SIGNATURE),
    "a read-only output": (lambda f: f(A, B, read_only()), ValueError, "C is read-only", "pass a copy"),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_wrong_call(artifact: Artifact, what: str) -> None:
    call, error, says, way_out = CALLS[what]
    with pytest.raises(error) as caught:
        call(artifact["gemm"])
    (line,) = str(caught.value).splitlines()
    assert says in line
    assert way_out in line
    assert "kd_" not in line, "no mangled name"


def test_an_artifact_says_how_many_kernels_it_has(artifact: Artifact) -> None:
    assert repr(artifact).endswith(f"for host: {len(artifact)} kernels>")


@pytest.mark.parametrize("part", ["", "manifest.json", "lib", "../.."])
def test_a_path_that_is_no_artifact_is_told_where_artifacts_are(artifact: Artifact, part: str) -> None:
    path = artifact.folder / part if part else artifact.folder.parent / "nowhere"
    with pytest.raises(ArtifactError, match="holds no artifact; `kerneldecl build` links them into dist/NAME-VERSION/TARGET"):
        kerneldecl.load(path)


def test_a_file_that_is_no_compiled_model_is_told(artifact: Artifact, tmp_path: Path) -> None:
    from kerneldecl.relax import load_model

    (tmp_path / "m.so").write_text("x")
    (tmp_path / "m.txt").write_text("x")
    (library,) = (artifact.folder / "lib").glob("*.so")
    told = {
        tmp_path / "m.so": "m.so is no compiled model: file too short",
        tmp_path / "m.txt": "m.txt is no compiled model by its name, MODEL.so",
        library: "is a library that holds no model",
    }
    for path, says in told.items():
        with pytest.raises(ArtifactError, match=f"{says}; `kerneldecl compile` writes one"):
            load_model(path)


ENTRIES = {
    "gem": ("'gem' is not in ", "did you mean 'gemm'?"),
    "gemm@host": ("'gemm@host' is not in ", "did you mean 'gemm'?"),
    "add": ("'add' is not in ", "dispatch('add') chooses among its sizes"),
    "softmax": ("'softmax' is not in ", "it holds add[shape=24x32], add[shape=7x9], gemm, relu"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_that_is_not_there(artifact: Artifact, name: str) -> None:
    with pytest.raises(KeyError) as caught:
        artifact[name]
    says, way_out = ENTRIES[name]
    assert says in str(caught.value)
    assert way_out in str(caught.value)


def test_sizes_that_nothing_was_declared_for(artifact: Artifact) -> None:
    with pytest.raises(KeyError, match=r"no entry of .* is called 'sub'; it holds add, gemm, relu"):
        artifact.dispatch("sub")
    with pytest.raises(ValueError, match=r"no kernel of add takes arrays of shapes \[1, 2\], \[1, 2\].* there are add\[shape=24x32\]"):
        artifact.dispatch("add")(zeros(1, 2), zeros(1, 2))


def test_a_namespace_of_torch_operators_is_an_identifier(artifact: Artifact) -> None:
    pytest.importorskip("torch", reason="needs torch")
    with pytest.raises(ValueError, match="choose an identifier"):
        artifact.torch_ops("my kernels")


BROKEN: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a folder that is not there": (shutil.rmtree, "holds no artifact", "`kerneldecl build` links them into dist/NAME-VERSION/TARGET"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "holds no artifact", "`kerneldecl build` links"),
    "a manifest cut off": (lambda folder: (folder / "manifest.json").write_text("{"), "cannot be read", "build it again"),
    "a manifest edited": (
        lambda folder: (folder / "manifest.json").write_text((folder / "manifest.json").read_text().replace("mini", "maxi")),
        "was changed after it was written",
        "build it again",
    ),
    "no library": (lambda folder: shutil.rmtree(folder / "lib"), "is missing from the artifact", "build it again"),
    "a library cut off": (
        lambda folder: [file.write_bytes(file.read_bytes()[:100]) for file in (folder / "lib").iterdir()],
        "has other content than its manifest says",
        "build it again",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_artifact(artifact: Artifact, tmp_path: Path, what: str) -> None:
    breaks, says, way_out = BROKEN[what]
    folder = tmp_path / "copy"
    shutil.copytree(artifact.folder, folder)
    breaks(folder)
    with pytest.raises(ArtifactError) as caught:
        kerneldecl.load(folder)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(str(folder))
    assert says in line
    assert way_out in line
