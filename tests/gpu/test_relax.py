"""Relax models on a GPU: correct with schedules and with an artifact's kernels, linked in or separate, exchanged, in a CUDA graph."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tvm
from support.networks.definitions import Network, NumpyOps, Weights, llama_network, mlp_network, resnet18_network
from support.networks.relax_ops import module_of
from support.spaces import Space
from tvm import relax, te

from kerneldecl.arrays import relative_error
from kerneldecl.artifact import link
from kerneldecl.artifact.archive import ARCHIVE, unpack_objects, write_archive
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.model import Arch
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch
from kerneldecl.relax import TIR_PIPELINE, export_model, load_model, pipeline
from kerneldecl.store.keys import digest
from kerneldecl.store.local import LocalStore
from kerneldecl.toolchain.linkers import LINKERS

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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace with an artifact of all functions of the networks."""
    space = Space(tmp_path_factory.mktemp("networks")).write({"workloads.toml": WORKLOADS})
    for network in NETWORKS:
        space.write({f"{network.name}.json": tvm.ir.save_json(module_of(network))})
        space.run("extract", f"{network.name}.json")
    space.run("build")
    return space


def executable(space: Space, network: Network, form: Any = "binary") -> Any:
    made_for = json.loads((space.artifact("gpu") / "manifest.json").read_text())["arch"]["target"]
    # In mode "schedule" TVM compiles traceless functions, which need the arch with wgmma.
    target = tvm.target.Target({**made_for, "arch": "sm_90a"} if form == "schedule" else made_for)
    passes = pipeline(space.artifact("gpu"), target, form, strict=True)
    return relax.build(module_of(network), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)


def arguments(network: Network) -> list[Any]:
    weights, inputs = Weights(network.dtype), network.arrays()
    network.build(NumpyOps(), {name: array.astype("float32") for name, array in inputs.items()}, lambda *of: weights(*of).astype("float32"))
    return [tvm.runtime.tensor(array, tvm.cuda(0)) for array in (*inputs.values(), *weights.arrays.values())]


def error_of(network: Network, machine: Any) -> float:
    return relative_error(machine["main"](*arguments(network)).numpy(), network.reference())


@pytest.mark.parametrize("way", ["separate", "linked", "schedule"])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_a_network_is_correct(built: Space, network: Network, way: str, tmp_path: Path) -> None:
    artifact = built.artifact("gpu")
    export_model(
        executable(built, network, "schedule" if way == "schedule" else "binary"),
        tmp_path / "model.so",
        artifact if way == "linked" else None,
    )
    model = load_model(tmp_path / "model.so", artifact if way == "separate" else None, tvm.cuda(0))
    assert error_of(network, model) <= TOLERANCE


def doubled(arch: Arch, symbol: str, store: LocalStore) -> bytes:
    """Return the object of a kernel that stands in for the MLP's softmax: twice the input."""
    x = te.placeholder((16, 10), "float16")
    mod = canonical_module(te.create_prim_func([x, te.compute((16, 10), lambda i, j: x[i, j] * te.const(2, "float16"), "twice")]))
    schedule = tvm.s_tir.Schedule(mod)
    schedule.bind(schedule.fuse(*schedule.get_loops(schedule.get_sblock("twice"))), "threadIdx.x")
    return compile_cuda_object(schedule.mod, arch, symbol, store).content


def exchange(folder: Path, symbol: str, content: bytes) -> None:
    """Have another kernel stand in an artifact for the one of a symbol, as one who writes artifacts would."""
    manifest = json.loads((folder / link.MANIFEST).read_text())
    objects = folder.parent / "objects"
    objects.mkdir()
    symbols = sorted({entry["symbol"] for entry in manifest["entries"]})
    files = unpack_objects(folder / ARCHIVE, symbols, objects)
    (objects / f"{symbol}.o").write_bytes(content)
    write_archive(folder / ARCHIVE, [(file.name, file.read_bytes()) for file in files])
    LINKERS["cuda"](folder / "other.so", files)
    name = f"lib/net-{digest((folder / 'other.so').read_bytes())[:16]}.so"
    (folder / manifest["library"]).unlink()
    (folder / "other.so").rename(folder / name)
    files = {each for each in manifest["files"] if each != manifest["library"]} | {name}
    manifest |= {"library": name, "files": {each: digest((folder / each).read_bytes()) for each in sorted(files)}}
    (folder / link.MANIFEST).write_bytes(link.with_digest(manifest))


class Doubled(NumpyOps):
    def softmax(self, x: Any) -> Any:
        return 2 * x


def test_kernels_of_another_artifact_replace_those_of_a_loaded_model(built: Space, tmp_path: Path) -> None:
    network = NETWORKS[0]
    export_model(executable(built, network), tmp_path / "model.so")
    other = Path(shutil.copytree(built.artifact("gpu"), tmp_path / "other"))
    entries = json.loads((other / link.MANIFEST).read_text())["entries"]
    (symbol,) = (entry["symbol"] for entry in entries if entry["name"] == "softmax")
    exchange(other, symbol, doubled(load_arch(STANDARD, "h200"), symbol, LocalStore(tmp_path / "cache")))
    model = load_model(tmp_path / "model.so", built.artifact("gpu"), tvm.cuda(0))
    assert error_of(network, model) <= TOLERANCE
    model.replace_kernels(other)
    weights = Weights(network.dtype)
    given = {name: array.astype("float32") for name, array in network.arrays().items()}
    want = network.build(Doubled(), given, lambda *of: weights(*of).astype("float32"))
    assert relative_error(model["main"](*arguments(network)).numpy(), want) <= TOLERANCE
    model.replace_kernels(built.artifact("gpu"))
    assert error_of(network, model) <= TOLERANCE


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
