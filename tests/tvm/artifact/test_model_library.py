"""Kernels of a GPU in a model's own library, without a GPU: TVM's runtime finds every one of them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tvm
from support.compilers import needs_nvcc
from support.cuda_process import LOAD, answer
from support.spaces import Space
from tvm import relax
from tvm.script import ir as I  # noqa: N812
from tvm.script import relax as R  # noqa: N812

from kerneldecl.artifact.model_library import link_model, with_modules
from kerneldecl.errors import ArtifactError, ToolchainError
from kerneldecl.relax import export_model, pipeline
from kerneldecl.toolchain.cuda_objects import sized

WORKLOADS = """\
edition = 1

[artifact]
name = "net"
version = "0.1.0"

[target.gpu]
arch = "h200"

[defaults]
top_k = 1

[[workload]]
name = "product"
rule = "matmul"
m = 64
n = 48
k = 80
epilogue = ["bias", "relu"]

[[workload]]
name = "softmax"
rule = "softmax"
shape = [64, 48]
"""


@I.ir_module
class Net:
    @R.function
    def main(  # noqa: ANN201
        x: R.Tensor((64, 80), "float32"),  # noqa: N805
        w: R.Tensor((80, 48), "float32"),
        b: R.Tensor((48,), "float32"),
    ):
        with R.dataflow():
            y = R.nn.softmax(R.nn.relu(R.add(R.matmul(x, w), b)))
            R.output(y)
        return y


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace with an artifact for the H200 of the model's two functions."""
    space = Space(tmp_path_factory.mktemp("net")).write({"workloads.toml": WORKLOADS})
    space.run_here("build", "--jobs", "1")
    return space


def manifest(space: Space) -> Any:
    return json.loads((space.artifact("gpu") / "manifest.json").read_text())


def executable(space: Space) -> Any:
    target = tvm.target.Target(manifest(space)["arch"]["target"])
    return relax.build(Net, target, relax_pipeline=pipeline(space.artifact("gpu"), target, "binary", strict=True))


MODULES = """
import tvm_ffi
load(tvm / "libtvm_runtime.so")
load(tvm / "libtvm_runtime_cuda.so")
model = tvm_ffi.load_module(str(library))
own = model.imports[0]
print(json.dumps({
    "model": model.kind,
    "functions": [own.implements_function(symbol) for symbol in symbols],
    "kernels": [sum(each.implements_function(f"{symbol}_kernel") for each in own.imports) for symbol in symbols],
    "kinds": [each.kind for each in own.imports],
}))
"""


@needs_nvcc
def test_the_runtime_finds_linked_kernels(built: Space, tmp_path: Path) -> None:
    export_model(executable(built), tmp_path / "model.so", built.artifact("gpu"))
    symbols = [entry["symbol"] for entry in manifest(built)["entries"]]
    found = answer(LOAD + MODULES, tmp_path / "model.so", tmp_path, *symbols)
    assert found["model"] == "relax.VMExecutable"
    assert found["functions"] == [True, True]
    assert found["kernels"] == [1, 1]
    assert found["kinds"] == ["cuda", "cuda"]


@needs_nvcc
def test_what_is_not_linked_in_is_not_in_the_library(built: Space, tmp_path: Path) -> None:
    export_model(executable(built), tmp_path / "model.so")
    symbols = [entry["symbol"] for entry in manifest(built)["entries"]]
    found = answer(LOAD + MODULES, tmp_path / "model.so", tmp_path, *symbols)
    assert (found["functions"], found["kernels"]) == ([False, False], [0, 0])


@pytest.mark.slow
@needs_nvcc
def test_a_model_that_lacks_a_kernel_is_not_exported(built: Space, tmp_path: Path) -> None:
    space = Space(tmp_path / "other").write({"workloads.toml": WORKLOADS.partition('[[workload]]\nname = "softmax"')[0]})
    space.run("build", "--jobs", "1")
    with pytest.raises(ArtifactError, match=r"the model calls kd_\w+, which .* does not have"):
        export_model(executable(built), tmp_path / "model.so", space.artifact("gpu"))
    assert not (tmp_path / "model.so").exists()


def table(*modules: bytes) -> bytes:
    """Return TVM's table of modules that import each other in turn."""
    begins, imports = [*range(len(modules)), len(modules) - 1], [*range(1, len(modules))]
    words = [len(begins), *begins, len(imports), *imports]
    return sized(b"".join(word.to_bytes(8, "little") for word in words) + b"".join(modules))


EXECUTABLE, LIBRARY, CUBIN = sized(b"relax.VMExecutable") + sized(b"code"), sized(b"_lib"), sized(b"cuda") + sized(b"cubin")


def test_modules_become_imports_of_the_library() -> None:
    packed = with_modules(table(EXECUTABLE, LIBRARY), [CUBIN, CUBIN])
    words = [int.from_bytes(packed[at : at + 8], "little") for at in range(0, 8 * 10, 8)]
    assert words == [len(packed) - 8, 5, 0, 1, 3, 3, 3, 3, 1, 2]
    assert packed.endswith((3).to_bytes(8, "little") + EXECUTABLE + LIBRARY + CUBIN + CUBIN)
    assert with_modules(table(EXECUTABLE, LIBRARY), [CUBIN]) == table(EXECUTABLE, LIBRARY, CUBIN)


def test_a_table_without_a_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no library in it"):
        with_modules(table(EXECUTABLE), [CUBIN])
    (tmp_path / "empty.c").write_text("int nothing;")
    with pytest.raises(ToolchainError, match="0 objects of the model have __tvm_ffi__library_bin"):
        link_model(str(tmp_path / "model.so"), [str(tmp_path / "empty.c")], [])
