"""Whole networks on the CPU: the results of an artifact of their functions, in both modes, with a kernel for each."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from support.networks.definitions import Network, NumpyOps, Weights, mlp_network, networks, small_networks
from support.networks.relax_ops import module_of
from support.spaces import REAL, Space
from support.thinned import every
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx

from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.model_import import read_model
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch, load_module
from kerneldecl.plugins.policy_order import standard_order
from kerneldecl.relax import export_model, load_model, pipeline

H200 = load_arch(STANDARD, "h200")
SMALL = small_networks()
TOLERANCE = {"float16": 2e-2, "float32": 1e-4}
HEAD = REAL["workloads.toml"].split("[[workload]]")[0].replace("top_k = 2", "top_k = 1")


def name_of(network: Network) -> str:
    return f"{network.name}-{network.dtype}"


def extracted(root: Path, networks: Sequence[Network]) -> Space:
    """Return a workspace with the functions of some networks, each by a schedule that is quickly found."""
    space = Space(root).write(REAL).write({"workloads.toml": HEAD})
    for network in networks:
        space.write({f"{name_of(network)}.json": tvm.ir.save_json(module_of(network))})
        space.run_here("extract", f"{name_of(network)}.json")
    return space


def arguments(network: Network) -> list[Any]:
    """Return the inputs and the weights, in the order of the module's arguments."""
    weights = Weights(network.dtype)
    inputs = network.arrays()
    network.build(NumpyOps(), {name: array.astype("float32") for name, array in inputs.items()}, lambda *of: weights(*of).astype("float32"))
    return [tvm.runtime.tensor(array) for array in (*inputs.values(), *weights.arrays.values())]


@pytest.mark.slow
@pytest.mark.parametrize("network", SMALL, ids=name_of)
def test_a_network_computes_its_reference_with_its_own_artifact(network: Network, tmp_path: Path) -> None:
    built = extracted(tmp_path / "space", [network])
    built.run("build", "--jobs", "1")
    for form in ("schedule", "binary"):
        _computes(built, network, form, tmp_path / form)


def _computes(built: Space, network: Network, form: Any, folder: Path) -> None:
    folder.mkdir()
    target = tvm.target.Target(json.loads((built.artifact() / "manifest.json").read_text())["arch"]["target"])
    executable = relax.build(module_of(network), target, relax_pipeline=pipeline(built.artifact(), target, form, strict=True))
    export_model(executable, folder / "model.so")
    got = load_model(folder / "model.so", built.artifact() if form == "binary" else None)["main"](*arguments(network)).numpy()
    assert relative_error(got, network.reference()) <= TOLERANCE[network.dtype]


def rules(space: Space, network: Network) -> Counter[str]:
    """Return how often each rule is declared for a network."""
    tables = tomllib.loads(space.read("workloads.toml"))["workload"]
    return Counter(table["rule"] for table in tables if name_of(network) in table["tags"])


@pytest.mark.slow
def test_functions_in_float32_are_those_of_standard_rules(tmp_path: Path) -> None:
    networks = [network for network in SMALL if network.dtype == "float32"]
    space = extracted(tmp_path, networks)
    found = {network.name: rules(space, network) for network in networks}
    assert found["mlp"] == {"matmul": 3, "softmax": 1}
    # Of images of 32 x 32 the last mean is of one pixel, which is a view.
    assert found["resnet18"] == {"conv2d": 18, "tensor_ir": 1, "matmul": 1}
    assert found["llama_prefill"]["rms_norm"] == 1


@pytest.mark.parametrize("network", every(2, networks()), ids=name_of)
def test_every_function_has_a_policy_that_knows_its_kind(network: Network) -> None:
    policies = {name: policy_of(func) for name, func, _ in read_model.called(read_model.fused(module_of(network)))}
    assert "gpu_fallback" not in policies.values()
    contractions = {policy for name, policy in policies.items() if "matmul" in name or "conv2d" in name}
    if network.name == "llama_decode":
        assert contractions <= {"gpu_gemv", "gpu_matmul"}
    elif network.dtype == "float32":
        assert contractions == {"gpu_matmul_simt"}
    else:
        assert contractions.isdisjoint({"gpu_gemv", "gpu_matmul_simt", "gpu_reduce"}), "tensor cores take them"


def policy_of(func: Any) -> str:
    """Return the first policy that proposes anything on an H200."""
    space = iter_space(canonical.canonical_module(func))
    return next(name for name in standard_order("cuda") if load_module("policies", STANDARD, name).propose(space, H200, 1))


@pytest.mark.parametrize(("dtype", "policy"), [("float16", "gpu_matmul_tc"), ("float32", "gpu_matmul_simt")])
def test_the_first_layer_of_an_mlp_is_cut_so_that_it_fills_the_gpu(dtype: str, policy: str) -> None:
    functions = read_model.called(read_model.fused(module_of(mlp_network(dtype))))
    first = next(func for name, func, _ in functions if "matmul" in name)
    (proposal,) = load_module("policies", STANDARD, policy).propose(iter_space(canonical.canonical_module(first)), H200, 1)
    assert dict(proposal.candidate.params)["split_k"] in {132, 264}


def imported() -> tuple[Any, Any]:
    """Return a small residual network as ONNX has it, channels first, and the same as Relax imports it, converted to NHWC."""
    rng = np.random.default_rng(3)
    shapes = {"w1": (16, 3, 3, 3), "b1": (16,), "w2": (16, 16, 3, 3), "b2": (16,), "w3": (10, 16), "b3": (10,)}
    weights = [numpy_helper.from_array(rng.standard_normal(shape).astype("float32") * 0.2, name) for name, shape in shapes.items()]
    three = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], **three, strides=[2, 2]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("MaxPool", ["r1"], ["p1"], **three, strides=[2, 2]),
        helper.make_node("Conv", ["p1", "w2", "b2"], ["c2"], **three),
        helper.make_node("Add", ["c2", "p1"], ["s2"]),
        helper.make_node("Relu", ["s2"], ["r2"]),
        helper.make_node("GlobalAveragePool", ["r2"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], transB=1),
    ]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name, shape in (("x", (2, 3, 24, 24)), ("y", (2, 10)))]
    model = helper.make_model(helper.make_graph(nodes, "net", *ends, weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model, relax.transform.ConvertLayout({"relax.nn.conv2d": ["NHWC", "HWIO"]})(from_onnx(model))


@pytest.mark.slow
def test_an_imported_network_is_converted_and_matches_onnx(tmp_path: Path) -> None:
    model, module = imported()
    space = Space(tmp_path).write(REAL).write({"workloads.toml": HEAD, "net.json": tvm.ir.save_json(module)})
    space.run("extract", "net.json")
    space.run("build", "--jobs", "1")
    functions = {name: canonical.signature_of(func) for name, func, _ in read_model.called(read_model.fused(module))}
    image, weights = (2, 6, 6, 16), (3, 3, 16, 16)
    # The residual is the convolution's own image, which the function takes twice.
    assert [image, weights, (16,), image, image] in [[shape for shape, _ in arguments_of] for arguments_of in functions.values()]
    target = tvm.target.Target(json.loads((space.artifact() / "manifest.json").read_text())["arch"]["target"])
    executable = relax.build(module, target, relax_pipeline=pipeline(space.artifact(), target, "binary", strict=True))
    export_model(executable, tmp_path / "model.so")
    x = np.random.default_rng(4).standard_normal((2, 3, 24, 24)).astype("float32")
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    got = load_model(tmp_path / "model.so", space.artifact())["main"](tvm.runtime.tensor(x))
    assert relative_error(got.numpy(), want) <= 1e-4
