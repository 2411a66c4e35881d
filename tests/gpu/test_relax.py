"""Relax models on a GPU: right with schedules and with kernels of an artifact, linked in or beside, exchanged, in a CUDA graph."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from _networks import Network, NumpyOps, Weights, llama_network, mlp_network, resnet18_network
from _networks_relax import module_of
from spaces import REPOSITORY, Space
from tvm import relax

from kerneldecl.arrays import relative_error
from kerneldecl.relax import export_model, load_model, pipeline

pytestmark = pytest.mark.gpu

WORKLOADS = """\
edition = 1

[artifact]
name = "net"
version = "0.1.0"

[target.gpu]
arch = "h200"

[defaults]
top_k = 2
"""
NETWORKS = [
    mlp_network("float16", 16, 16),
    resnet18_network("float16", 2, 32, 16, 10),
    llama_network("float16", 1, 7, hidden=64, heads=4, ffn=96),
]
TOLERANCE = 3e-2


def python_path() -> str:
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH", ""))))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace with an artifact of all functions of the networks."""
    space = Space(tmp_path_factory.mktemp("networks")).write({"workloads.toml": WORKLOADS})
    for network in NETWORKS:
        space.write({f"{network.name}.json": tvm.ir.save_json(module_of(network))})
        space.run("extract", f"{network.name}.json", PYTHONPATH=python_path())
    space.run("build", PYTHONPATH=python_path())
    return space


def executable(space: Space, network: Network, form: Any = "binary") -> Any:
    target = tvm.target.Target(json.loads((space.artifact("gpu") / "manifest.json").read_text())["arch"]["target"])
    passes = pipeline(space.artifact("gpu"), target, form, strict=True)
    with tvm.transform.PassContext(config={"tirx.use_async_copy": True}):
        return relax.build(module_of(network), target, relax_pipeline=passes)


def arguments(network: Network) -> list[Any]:
    weights, inputs = Weights(network.dtype), network.arrays()
    network.build(NumpyOps(), {name: array.astype("float32") for name, array in inputs.items()}, lambda *of: weights(*of).astype("float32"))
    return [tvm.runtime.tensor(array, tvm.cuda(0)) for array in (*inputs.values(), *weights.arrays.values())]


def error_of(network: Network, machine: Any) -> float:
    return relative_error(machine["main"](*arguments(network)).numpy(), network.reference())


@pytest.mark.parametrize("way", ["beside", "linked", "schedule"])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_a_network_is_right(built: Space, network: Network, way: str, tmp_path: Path) -> None:
    artifact = built.artifact("gpu")
    export_model(
        executable(built, network, "schedule" if way == "schedule" else "binary"),
        tmp_path / "model.so",
        artifact if way == "linked" else None,
    )
    model = load_model(tmp_path / "model.so", artifact if way == "beside" else None, tvm.cuda(0))
    assert error_of(network, model) <= TOLERANCE


def test_kernels_are_exchanged(built: Space, tmp_path: Path) -> None:
    network = NETWORKS[0]
    export_model(executable(built, network), tmp_path / "model.so")
    copy = Path(shutil.copytree(built.artifact("gpu"), tmp_path / "copy"))
    model = load_model(tmp_path / "model.so", built.artifact("gpu"), tvm.cuda(0))
    before = model["main"](*arguments(network)).numpy()
    model.replace_kernels(copy)
    np.testing.assert_array_equal(model["main"](*arguments(network)).numpy(), before)


def test_a_model_runs_on_the_stream_that_is_current(built: Space, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="its streams and graphs are what is tested")
    import tvm_ffi

    network = NETWORKS[1]
    export_model(executable(built, network), tmp_path / "model.so", built.artifact("gpu"))
    main, given = load_model(tmp_path / "model.so", device=tvm.cuda(0))["main"], arguments(network)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), tvm_ffi.use_torch_stream():
        main(*given)  # what is allocated here is there again in the graph
    with torch.cuda.graph(graph, stream=stream), tvm_ffi.use_torch_stream():
        captured = main(*given)
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(captured.numpy(), network.reference()) <= TOLERANCE
