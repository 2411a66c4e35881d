"""A model's weights lie beside its library, once, and are mapped; a loaded model is its own, whatever becomes of the file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from support.spaces import Space, clean_environment
from support.thinned import only
from tvm import relax

from kerneldecl.arrays import Array
from kerneldecl.errors import ArtifactError
from kerneldecl.relax import TIR_PIPELINE, ShapeBuckets, export_model, load_model, pipeline, target_of

RNG = np.random.default_rng(7)
WORKLOADS = """\
edition = 1

[artifact]
name = "small"
version = "0.1.0"

[target.host]
arch = "host"

[defaults]
top_k = 1

[[workload]]
name = "relu"
rule = "elementwise"
op = "relu"
shape = [4, 8]
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an artifact that the models here use no kernel of, or one."""
    space = Space(tmp_path_factory.mktemp("relu")).write({"workloads.toml": WORKLOADS})
    space.run_here("build", "--jobs", "1")
    return space.artifact()


def linear(weight: Array, rows: int | str = 4) -> tvm.IRModule:
    """Return relu(x @ weight) + x @ weight, with the weight a constant twice, and the same memory."""
    builder = relax.BlockBuilder()
    extent: Any = tvm.tirx.Var(rows, "int64") if isinstance(rows, str) else rows
    x = relax.Var("x", relax.TensorType((extent, weight.shape[0]), str(weight.dtype)))
    shared = tvm.runtime.tensor(weight)
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit(relax.op.nn.relu(relax.op.matmul(x, relax.const(shared))))
            out = builder.emit_output(relax.op.add(first, relax.op.matmul(x, relax.const(shared))))
        builder.emit_func_output(out)
    return builder.get()


def export(mod: tvm.IRModule, artifact: Path, library: Path) -> Path:
    target = target_of(artifact)
    passes = pipeline(artifact, target, "binary", detach_weights=True)
    executable = relax.build(mod, target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    export_model(executable, library, artifact, passes.weights)
    return library


def called(model: Any, x: Array) -> Array:
    found: Array = model["main"](tvm.runtime.tensor(x)).numpy()
    return found


def expected(x: Array, weight: Array) -> Array:
    return np.maximum(x @ weight, 0) + x @ weight


def random(*shape: int) -> Array:
    return RNG.standard_normal(shape, dtype="float32")


def test_a_model_runs_with_weights_that_another_library_reads(artifact: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="it defines the format")
    weight, x = random(64, 33), random(4, 64)
    library = export(linear(weight), artifact, tmp_path / "model.so")
    stored = safetensors.load_file(tmp_path / "model.weights.safetensors")
    assert len(stored) == 1  # two constants in one place are one weight
    np.testing.assert_array_equal(next(iter(stored.values())), weight)
    assert weight.tobytes() not in library.read_bytes()
    np.testing.assert_allclose(called(load_model(library), x), expected(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_half_precision_and_sizes_that_are_no_multiple_of_a_vector(artifact: Path, tmp_path: Path) -> None:
    weight = RNG.standard_normal((51, 37), dtype="float32").astype(ml_dtypes.bfloat16)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((51, 37), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            both = [relax.const(tvm.runtime.tensor(each)) for each in (weight, weight + weight)]
            total = builder.emit(relax.op.add(*(relax.op.astype(each, "float32") for each in both)))
            out = builder.emit_output(relax.op.add(x, total))
        builder.emit_func_output(out)
    given = random(51, 37)
    found = called(load_model(export(builder.get(), artifact, tmp_path / "model.so")), given)
    np.testing.assert_allclose(found, given + 3 * weight.astype("float32"), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_copies_for_shape_buckets_share_their_weights(artifact: Path, tmp_path: Path) -> None:
    weight = random(64, 32)
    library = export(ShapeBuckets({"n": (1, 4)})(linear(weight, "n")), artifact, tmp_path / "model.so")
    assert (tmp_path / "model.weights.safetensors").stat().st_size < 1.5 * weight.nbytes
    model = load_model(library)
    for rows in (1, 4, 7):
        x = random(rows, 64)
        np.testing.assert_allclose(called(model, x), expected(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_inputs_that_do_not_fit_get_the_signature(artifact: Path, tmp_path: Path) -> None:
    main = load_model(export(linear(random(64, 32)), artifact, tmp_path / "model.so"))["main"]
    wrong = {
        "input x is float32[5, 64]; expected main(x: float32[4, 64])": [random(5, 64)],
        "input x is float64[4, 64]; expected main(x: float32[4, 64])": [random(4, 64).astype("float64")],
        "2 inputs were given; expected main(x: float32[4, 64])": [random(4, 64), random(4, 64)],
    }
    for sentence, arrays in wrong.items():
        with pytest.raises(ValueError, match="expected main") as raised:
            main(*map(tvm.runtime.tensor, arrays))
        assert str(raised.value) == sentence


@pytest.mark.slow
def test_weights_of_another_export_and_missing_ones_are_refused(artifact: Path, tmp_path: Path) -> None:
    library = export(linear(random(64, 32)), artifact, tmp_path / "model.so")
    weights = tmp_path / "model.weights.safetensors"
    export(linear(random(64, 32)), artifact, tmp_path / "other.so")
    kept = weights.read_bytes()
    shutil.copy(tmp_path / "other.weights.safetensors", weights)
    with pytest.raises(ArtifactError, match=r"are not those that model\.so was exported with"):
        load_model(library)
    weights.write_bytes(kept[:-100])
    with pytest.raises(ArtifactError, match="not whole"):
        load_model(library)
    weights.unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_model(library)


@pytest.mark.slow
@pytest.mark.parametrize("way", only(("written over",), ["exported again", "written over"]))
def test_a_library_at_the_path_of_a_loaded_one_is_the_new_one(artifact: Path, tmp_path: Path, way: str) -> None:
    weight, x = random(64, 32), random(4, 64)
    library = export(linear(weight), artifact, tmp_path / "model.so")
    first = load_model(library)
    other = linear(random(64, 48))
    if way == "exported again":
        export(other, artifact, library)
    else:
        export(other, artifact, tmp_path / "other.so")
        (tmp_path / "other.weights.safetensors").replace(tmp_path / "model.weights.safetensors")
        library.write_bytes((tmp_path / "other.so").read_bytes())  # in place: pages of a library that is mapped would change
    second = load_model(library)
    assert called(second, x).shape == (4, 48)
    np.testing.assert_allclose(called(first, x), expected(x, weight), rtol=1e-4, atol=1e-4)


MEMORY = """
import json, resource, sys
sys.modules["torch"] = None  # which tvm_ffi imports where it is installed: it takes seconds
import numpy as np, tvm
from kerneldecl.relax import load_model
def peak(): return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
out = load_model(sys.argv[1])["main"](tvm.runtime.tensor(np.ones((1, int(sys.argv[2])), "float32"))).numpy()
print(json.dumps({"bytes": peak() - before, "first": float(out[0, 0])}))
"""


@pytest.mark.slow
def test_memory_is_that_of_the_weights(artifact: Path, tmp_path: Path) -> None:
    rows, columns = 100_000, 512  # 205 MB
    library = export(linear(np.full((rows, columns), 0.5, "float32"), 1), artifact, tmp_path / "model.so")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(library), str(rows)], env=clean_environment(), capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["first"] == rows
    assert found["bytes"] <= 1.2 * 4 * rows * columns


def test_a_model_without_functions_of_its_own_has_no_constants_in_c(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As C, a network's constants would take the compiler minutes."""
    real, told = shutil.which("g++"), tmp_path / "told"
    assert real
    wrapper = tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {told}\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.relu(x))
        builder.emit_func_output(out)
    target = target_of(artifact)
    passes = pipeline(artifact, target, "binary")
    executable = relax.build(builder.get(), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    assert passes.report is not None
    assert [match.outcome for match in passes.report.matches] == ["hit"]
    export_model(executable, tmp_path / "model.so")
    assert told.exists()
    assert not [word for word in told.read_text().split() if word.endswith("devc.c")]
    given = RNG.standard_normal((4, 8)).astype("float32")
    model = load_model(tmp_path / "model.so", artifact)
    assert np.array_equal(model["main"](tvm.runtime.tensor(given)).numpy(), np.maximum(given, 0))
