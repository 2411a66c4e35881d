"""Owns the tests that packages are used as their users do: by pip, by torch and JAX, by Hugging Face's kernels, by verify and bench.

Knows nothing of registries.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.spaces import REAL, Space, clean_environment

import kerneldecl
from kerneldecl.toolchain.versions import PINS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace that was built, with its package in each form."""
    space = Space(tmp_path_factory.mktemp("made"))
    space.write(REAL)
    space.run_here("build")
    for form, output in (("tar", "mini.tar"), ("wheel", "wheels"), ("hf-kernel", "hub")):
        space.run_here("export", "--format", form, "-o", output)
    return space


@pytest.fixture(scope="module")
def module(made: Space, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Return the module of the wheel, installed where this process finds it."""
    site = tmp_path_factory.mktemp("site")
    (wheel,) = (made.root / "wheels").iterdir()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True)
    sys.path.insert(0, str(site))
    yield importlib.import_module("mini")
    sys.path.remove(str(site))


RNG = np.random.default_rng(0)
A, B = RNG.random((16, 32), dtype="float32"), RNG.random((32, 24), dtype="float32")


def test_numpy_gets_its_outputs_or_gives_them(module: ModuleType) -> None:
    gemm = module.kernels["gemm"]
    found = gemm(A, B)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, A @ B, rtol=1e-4)
    out = np.zeros((16, 24), "float32")
    assert gemm(A, B, out) is None
    np.testing.assert_array_equal(out, found)
    assert set(module.kernels) == {"add[shape=24x32]", "add[shape=7x9]", "relu", "gemm"}
    with pytest.raises(KeyError, match="is not among"):
        module.kernels["GEMM"]
    with pytest.raises((TypeError, ValueError), match="Mismatched"):
        gemm(A, A)


def test_torch_gets_tensors(module: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    found = module.kernels["gemm"](torch.from_numpy(A), torch.from_numpy(B))
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found.numpy(), A @ B, rtol=1e-4)


def test_jax_gets_arrays(module: ModuleType) -> None:
    jax = pytest.importorskip("jax")
    found = module.kernels["gemm"](jax.numpy.asarray(A), jax.numpy.asarray(B))
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(np.asarray(found), A @ B, rtol=1e-4)


def test_the_kernels_of_hugging_face_load_it(made: Space) -> None:
    kernels = pytest.importorskip("kernels")
    loaded = kernels.get_local_kernel(made.root / "hub", backend="cpu")
    np.testing.assert_allclose(loaded.kernels["gemm"](A, B), A @ B, rtol=1e-4)
    from kernels import _rust

    (variant,) = (made.root / "hub/build").iterdir()
    metadata = _rust.Metadata.read_from_file(variant / "metadata.json")
    found = _rust.Digest.hash_variant(metadata.digest.algorithm, variant)
    names = {name for name in found.files if "__pycache__" not in name}
    assert {name: found.files[name] for name in names} == dict(metadata.digest.files)


@pytest.mark.slow
def test_a_package_is_verified_and_timed_where_its_workspace_is_not(made: Space, tmp_path: Path) -> None:
    elsewhere = Space(tmp_path)
    for packed in (made.root / "mini.tar", next((made.root / "wheels").iterdir())):
        verified = elsewhere.run_json("verify", str(packed))
        (verdict,) = verified["artifacts"]
        assert [entry["ok"] for entry in verdict["entries"]] == [True] * 4
        assert verdict["signature"] == "not signed"
    timed = elsewhere.run_json("bench", str(made.root / "mini.tar"))
    assert timed["timed_on"] == timed["recorded_on"]
    for entry in timed["entries"]:
        assert entry["before"]["timing"] == entry["after"]["timing"] == "steady"
        assert set(entry["after"]["timings"]) == {"isolated"}
        assert entry["after"]["run_secs"] > 0
    same = elsewhere.run_json("diff", str(made.root / "mini.tar"), str(next((made.root / "wheels").iterdir())))
    assert {entry["verdict"] for entry in same["entries"]} == {"SAME"}
    # An artifact in its folder is timed, too, beside the records of its workspace.
    assert len(made.run_json("bench", "dist/mini-0.1.0/host")["entries"]) == 4


def test_an_unpacked_package_is_loaded(made: Space, tmp_path: Path) -> None:
    from kerneldecl.package.tar import unpack_tar

    unpack_tar(made.root / "mini.tar", tmp_path)
    out = np.empty((16, 24), "float32")
    kerneldecl.load(tmp_path)["gemm"](A, B, out)
    np.testing.assert_allclose(out, A @ B, rtol=1e-4)


def test_a_kernel_that_is_wrong_here_is_not_timed(made: Space, tmp_path: Path) -> None:
    """The package of an entry whose tolerance nothing meets."""
    from kerneldecl.artifact.manifest import with_digest

    space = made.copy_of(tmp_path / "other", "dist")
    manifest = space.json("dist/mini-0.1.0/host/manifest.json")
    for entry in manifest["entries"]:
        entry["verdict"]["tolerance"] = -1.0
    (space.root / "dist/mini-0.1.0/host/manifest.json").write_bytes(with_digest(manifest))
    assert "relative error" in space.run_here("bench", "dist/mini-0.1.0/host", code=7).stderr


SCRIPT = """
import sys
import numpy as np
from mini import kernels

assert "tvm" not in sys.modules and "kerneldecl" not in sys.modules
a, b = np.ones((16, 32), "float32"), np.ones((32, 24), "float32")
assert (kernels["gemm"](a, b) == 32).all()
x = np.ones((24, 32), "float32")
assert (kernels["add[shape=24x32]"](x, x) == 2).all()
print("right")
"""


@pytest.mark.slow
def test_pip_installs_a_wheel_where_neither_tvm_nor_kerneldecl_is(made: Space, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    (wheel,) = (made.root / "wheels").iterdir()
    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    subprocess.run([python, "-m", "pip", "install", "-q", str(wheel), "numpy"], check=True, env=environment)
    listed = subprocess.run([python, "-m", "pip", "list"], check=True, env=environment, capture_output=True, text=True).stdout
    assert f"apache-tvm-ffi    {PINS['tvm_ffi']}" in listed
    assert "apache-tvm " not in listed
    done = subprocess.run([python, "-c", SCRIPT], check=False, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "right\n", done.stderr
