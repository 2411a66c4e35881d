"""Calls of vendors' libraries: OpenBLAS computes what the rule computes; calls of cuBLASLt and cuDNN say what the function is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.thinned import at, second
from tvm import tirx

from kerneldecl.arrays import relative_error
from kerneldecl.artifact.kernels import kernel_of, load_library
from kerneldecl.compiler import actions, canonical, cpu, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.hardware.host import detect
from kerneldecl.hardware.vendor_libraries import load_vendor_library
from kerneldecl.model import Arch
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import library
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.rule import Rule
from kerneldecl.serial import to_json
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import library_attention, library_conv2d, library_matmul
from kerneldecl.templates.hopper.read_conv import read_convolution
from kerneldecl.toolchain import companions
from kerneldecl.toolchain.linkers import LINKERS
from kerneldecl.toolchain.versions import PINS

VERSION = library.Options().openblas
needs_openblas = pytest.mark.skipif(not load_vendor_library("libscipy_openblas.so"), reason="needs scipy-openblas32")
GEMMS: dict[str, dict[str, Any]] = {
    "nn": {"m": 33, "n": 48, "k": 20},
    "nt, bias, relu": {"m": 33, "n": 48, "k": 20, "layout": "nt", "epilogue": ("bias", "relu")},
    "tt of a batch, residual, gelu": {"m": 8, "n": 16, "k": 20, "batch": 3, "layout": "tt", "epilogue": ("add", "gelu")},
    "tn in float64, ragged": {"m": 8, "n": 17, "k": 20, "layout": "tn", "dtype": "float64", "epilogue": ("bias",)},
    "heads": {"m": 8, "n": 16, "k": 20, "batch": 3, "heads": 2},
    "one row": {"m": 1, "n": 16, "k": 20, "epilogue": ("relu",)},
    "one column": {"m": 5, "n": 1, "k": 20},
    "rows in parts": {"m": 203, "n": 48, "k": 64, "epilogue": ("bias", "gelu")},
    "columns in parts": {"m": 40, "n": 208, "k": 64, "layout": "tt", "epilogue": ("bias", "add")},
    "ragged columns in parts": {"m": 40, "n": 211, "k": 64, "layout": "tn", "epilogue": ("relu",)},
    "batch in parts": {"m": 48, "n": 100, "k": 64, "batch": 2, "epilogue": ("add",)},
}


def rule_of(name: str, attrs: dict[str, Any]) -> Rule:
    return load_rule(STANDARD, name)(**attrs)


def of_cores(count: int) -> Arch:
    """Return this machine with another number of cores: so many parts a product is cut into."""
    host = detect()
    return replace(host, cpu=replace(host.the_cpu, cores=count))


def built(rule: Rule, folder: Path, version: str = VERSION) -> Any:
    """Return a kernel that calls OpenBLAS."""
    mod, arch = canonical.lower(rule), of_cores(7)
    called = library_matmul.apply(mod, {"library": "openblas", "version": version, "algorithm": 0}, arch)
    assert called is not None
    (folder / "kernel.o").write_bytes(cpu.compile_object(cpu.scheduled_module(mod, called).mod, arch, "kd_x"))
    LINKERS["cpu"](folder / "kernel.so", [folder / "kernel.o"])
    return kernel_of(load_library(folder / "kernel.so"), "kd_x")


@needs_openblas
@pytest.mark.parametrize("name", second(GEMMS))
def test_gemms_by_openblas_compute_what_the_rule_does(name: str, tmp_path: Path) -> None:
    rule = rule_of("matmul", GEMMS[name])
    inputs = rule.inputs(np.random.default_rng(0))
    want = rule.reference(*inputs)
    (out,) = rule.signature().outputs
    got = np.full(out.shape, 77, out.dtype)
    built(rule, tmp_path)(*inputs, got)
    assert relative_error(got, want) < rule.tolerance()


@needs_openblas
def test_another_version_than_the_tuned_one_is_refused_by_a_sentence(tmp_path: Path) -> None:
    rule = rule_of("matmul", GEMMS["nn"])
    with pytest.raises(RuntimeError, match=r"OpenBLAS 0\.\d.* is loaded, and this kernel was tuned with 0\.3\.3: pip install"):
        built(rule, tmp_path, "0.3.3")(*rule.inputs(np.random.default_rng(0)), np.empty((33, 48), "float32"))


def call_of(template: Any, name: str, attrs: dict[str, Any]) -> list[str] | None:
    """Return the arguments of the call that a template makes of a rule on an H200; None where it does not apply."""
    mod, arch = canonical.lower(rule_of(name, attrs)), load_arch(STANDARD, "h200")
    params = {"library": "cublaslt", "version": "13.1", "algorithm": 3, "engine": 3}
    called = template.apply(mod, params, arch)
    if called is None:
        return None
    (found,) = re.findall(r"T\.call_extern\(\"int32\", (.*)\) != 0", called["main"].script())
    found = found.replace("T.reinterpret(T.handle().ty, T.uint64(0))", "0")
    return [re.sub(r"T\.int64\((\d+)\)", r"\1", each) for each in found.split(", ")]


def test_a_gemm_for_cublaslt_is_in_column_major_order_with_its_bias_along_the_rows() -> None:
    attrs = {"m": 32, "n": 64, "k": 16, "layout": "nt", "dtype": "float16", "epilogue": ("bias", "relu")}
    name, version, *rest = call_of(library_matmul, "matmul", attrs) or []
    assert (name, version) == ('"kerneldecl_cublaslt_matmul_1"', '"13.1"')
    assert rest[:5] == ["B.data", "A.data", "0", "bias.data", "C.data"]
    # algorithm; float16 three times, float32 accumulators and scale; bias and relu; B transposed, A not; m, n, k, batch; pitches; strides
    assert rest[5:] == ["3", *("2", "2", "2", "68", "0"), "6", "1", "0", *("64", "32", "16", "1"), *("16", "16", "64"), *("0", "0", "0")]


@pytest.mark.parametrize(
    ("attrs", "numbers"),
    [
        ({"dtype": "bfloat16"}, ["14", "14", "14", "68", "0"]),
        ({}, ["0", "0", "0", "68", "0"]),
        ({"dtype": "float16", "accum_dtype": "float16"}, ["2", "2", "2", "64", "2"]),
        ({"dtype": "int8"}, ["3", "3", "10", "72", "10"]),
        ({"dtype": "float8_e4m3fn", "out_dtype": "float16"}, ["28", "28", "2", "68", "0"]),
        ({"dtype": "float64"}, ["1", "1", "1", "70", "1"]),
    ],
)
def test_cublaslt_computes_in_the_dtypes_of_the_rule(attrs: dict[str, Any], numbers: list[str]) -> None:
    call = call_of(library_matmul, "matmul", {"m": 32, "n": 64, "k": 16, "layout": "nt", **attrs})
    assert call is not None
    assert call[8:13] == numbers


@pytest.mark.parametrize(
    ("epilogue", "bits"),
    [((), "1"), (("relu",), "2"), (("bias",), "4"), (("add", "bias", "gelu_tanh"), "36"), (("gelu_tanh",), "32")],
)
def test_cublaslt_gets_the_epilogue_that_it_knows(epilogue: tuple[str, ...], bits: str) -> None:
    call = call_of(library_matmul, "matmul", {"m": 32, "n": 64, "k": 16, "dtype": "float16", "epilogue": epilogue})
    assert call is not None
    assert call[13] == bits
    assert (call[4] != "0", call[5] != "0") == ("add" in epilogue, "bias" in epilogue)


@pytest.mark.parametrize(
    "attrs",
    [
        {"epilogue": ("gelu",)},  # cuBLASLt's is the approximation by tanh
        {"epilogue": ("relu", "bias")},
        {"epilogue": ("scale_columns",)},
        {"out_dtype": "bfloat16"},
        {"dtype": "float32", "precision": "tfloat32"},  # rounded there, truncated here
        {"batch": 2, "heads": 3, "interleaved": "ab"},
    ],
)
def test_what_cublaslt_does_not_compute_in_one_call_is_left_to_others(attrs: dict[str, Any]) -> None:
    assert call_of(library_matmul, "matmul", {"m": 32, "n": 64, "k": 16, "dtype": "float16", **attrs}) is None


CONVOLUTION = {"n": 2, "h": 12, "w": 10, "c": 8, "f": 16, "kh": 3, "kw": 3, "padding": 1, "stride": 2, "dtype": "float16"}


def test_a_convolution_for_cudnn_has_its_weights_copied_to_channels_innermost() -> None:
    call = call_of(library_conv2d, "conv2d", {**CONVOLUTION, "epilogue": ("bias", "add", "relu")})
    assert call is not None
    assert call[:7] == ['"kerneldecl_cudnn_conv2d_1"', '"13.1"', "X.data", "weights.data", "residual.data", "bias.data", "Y.data"]
    assert call[7:15] == ["3", "2", "2", "1", "100", "2", "8", "16"]
    assert call[15:] == [*("12", "10", "6", "5", "3", "3"), *("2", "2", "1", "1"), *("1", "1", "1", "1")]


@pytest.mark.parametrize("attrs", [{}, {"c": 3, "f": 5, "kw": 2}])
def test_weights_are_copied_with_their_channels_innermost(attrs: dict[str, Any], tmp_path: Path) -> None:
    """Run the kernel that copies them on the CPU, block by block and thread by thread."""
    found = read_convolution(canonical.lower(rule_of("conv2d", {**CONVOLUTION, **attrs})))
    assert found is not None
    f, r, s, c = shape = (found.filters, found.rows.taps, found.columns.taps, found.channels)
    copied = tirx.decl_buffer(shape, "float16", "copied")
    block = library_conv2d._copied(found, copied)
    thread = block.body
    serial = tirx.For(thread.loop_var, 0, thread.extent, tirx.ForKind.SERIAL, thread.body)
    func = tirx.PrimFunc([found.weights, copied], tirx.For(block.loop_var, 0, block.extent, tirx.ForKind.SERIAL, serial))
    mod = tvm.IRModule({"main": func.with_attr({"global_symbol": "main", "s_tir": True})})
    (tmp_path / "copy.o").write_bytes(cpu.compile_object(mod, detect(), "kd_copy"))
    LINKERS["cpu"](tmp_path / "copy.so", [tmp_path / "copy.o"])
    weights = np.random.default_rng(0).standard_normal((r, s, c, f)).astype("float16")
    got = np.full(shape, 77, "float16")
    kernel_of(load_library(tmp_path / "copy.so"), "kd_copy")(weights, got)
    assert np.array_equal(got, weights.transpose(3, 0, 1, 2))


def test_convolutions_in_groups_are_left_to_others() -> None:
    assert call_of(library_conv2d, "conv2d", {**CONVOLUTION, "groups": 2}) is None


ATTENTION = {"batch": 2, "heads": 8, "kv_heads": 2, "queries": 48, "keys": 64, "head_dim": 64, "value_dim": 32, "causal": True}


@pytest.mark.parametrize(
    ("attrs", "sums", "numbers"),
    [
        ({}, "0", ["2", "0", "2", "8", "2", "48", "64", "64", "32", "2"]),
        (
            {"causal": False, "dtype": "bfloat16", "logsumexp": True},
            "logsumexp.data",
            ["9", "0", "2", "8", "2", "48", "64", "64", "32", "0"],
        ),
        ({"layout": "bshd", "align": "start"}, "0", ["2", "1", "2", "8", "2", "48", "64", "64", "32", "1"]),
    ],
)
def test_attention_for_cudnn_says_its_sizes_and_the_last_key_of_a_query(attrs: dict[str, Any], sums: str, numbers: list[str]) -> None:
    call = call_of(library_attention, "attention", {**ATTENTION, "scale": 0.25, **attrs})
    assert call is not None
    assert call[:7] == ['"kerneldecl_cudnn_attention_1"', '"13.1"', "Q.data", "K.data", "V.data", "O.data", sums]
    assert call[7] == "T.float64(0.25)"
    assert call[8:] == ["3", *numbers]


@pytest.mark.parametrize(
    "attrs",
    [
        {"window": 8},
        {"mask": True},
        {"alibi": True},
        {"softcap": 5.0},
        {"dtype": "float32"},
        {"head_dim": 60},
        {"queries": 80},  # the first queries see no key
        {"layout": "packed", "queries": 64, "value_dim": 64},
    ],
)
def test_attention_that_cudnn_does_not_compute_is_left_to_others(attrs: dict[str, Any]) -> None:
    rule = rule_of("attention", {**ATTENTION, **attrs})
    space = SearchSpace(iter_space(canonical.lower(rule)), load_arch(STANDARD, "h200"), 20, ())
    assert library.configurations(space, library.Options()) == ()
    assert call_of(library_attention, "attention", {**ATTENTION, **attrs}) is None


@pytest.mark.parametrize(
    ("arch", "name", "attrs", "expected"),
    [
        ("h200", "matmul", {"m": 32, "n": 64, "k": 16}, {"cublaslt": 8}),
        ("h200", "conv2d", CONVOLUTION, {"cudnn": 8}),
        ("h200", "conv2d", {**CONVOLUTION, "kh": 1, "kw": 1, "padding": 0}, {"cudnn": 8, "cublaslt": 8}),
        ("h200", "matmul", {"m": 32, "n": 64, "k": 16, "precision": "tfloat32"}, {}),
        ("h200", "softmax", {"shape": (8, 16)}, {}),
        ("h200", "attention", ATTENTION, {"cudnn": 2}),
        ("x86-64-v3", "attention", {**ATTENTION, "dtype": "float32"}, {}),
        ("x86-64-v3", "matmul", {"m": 32, "n": 64, "k": 16}, {"openblas": 1}),
        ("x86-64-v3", "matmul", {"m": 32, "n": 64, "k": 16, "dtype": "float16"}, {}),
    ],
)
def test_the_policy_proposes_the_libraries_of_the_device(arch: str, name: str, attrs: dict[str, Any], expected: dict[str, int]) -> None:
    space = SearchSpace(iter_space(canonical.lower(rule_of(name, attrs))), load_arch(STANDARD, arch), 20, ())
    found = [dict(each.candidate.params)["library"] for each in library.configurations(space, library.Options())]
    assert {library: found.count(library) for library in dict.fromkeys(found)} == expected


def test_a_gpu_kernel_that_only_calls_a_library_links_without_device_code(tmp_path: Path) -> None:
    arch = load_arch(STANDARD, "h200")
    objects = []
    for number, version in enumerate(("13.1", "13.0")):
        mod = canonical.lower(rule_of("matmul", {"m": 32, "n": 64, "k": 16, "dtype": "float16"}))
        called = library_matmul.apply(mod, {"library": "cublaslt", "version": version, "algorithm": 0}, arch)
        compiled = cuda.compile_cuda_object(cpu.scheduled_module(mod, called).mod, arch, f"kd_{number}", LocalStore(tmp_path / "cache"))
        assert compiled.launches == ()
        objects.append(compiled)
        (tmp_path / f"{number}.o").write_bytes(compiled.content)
    assert objects[0].code != objects[1].code  # times of one version do not stand for another's
    LINKERS["cuda"](tmp_path / "both.so", [tmp_path / "0.o", tmp_path / "1.o"])
    loaded = load_library(tmp_path / "both.so")
    assert all(loaded.implements_function(f"kd_{number}") for number in range(2))


@pytest.mark.parametrize(("arch", "called"), at({1}, [("x86-64-v3", "openblas"), ("h200", "cublaslt")]))
def test_what_a_call_is_linked_with_is_in_the_keys_of_what_is_measured_of_it(
    arch: str, called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object stays as it is: it is linked with the source of now. Times and verdicts are of both."""
    attrs = {"m": 32, "n": 64, "k": 16}
    computation = canonical.module_digest(canonical.lower(rule_of("matmul", attrs)))
    spec = {"root": str(STANDARD), "rule": "matmul", "attrs": attrs, "cache": str(tmp_path / "cache"), "computation": computation}
    candidate = {"template": "library_matmul", "params": {"library": called, "version": "1", "algorithm": 0}}
    for source in {file for name in companions.VENDOR_CALLS for file in companions.files_behind(name)}:
        (tmp_path / source.name).write_bytes(source.read_bytes())
    copies = {name: tuple(tmp_path / each.name for each in found) for name, found in companions.CALLS.items()}
    monkeypatch.setattr(companions, "CALLS", copies)

    def built() -> tuple[str, str, bytes]:
        companions._source_digest.cache_clear()
        found = actions.build(spec, candidate, to_json(load_arch(STANDARD, arch)), PINS, str(tmp_path), force=True)
        companions._source_digest.cache_clear()
        return found["schedule_digest"], found["code_digest"], (tmp_path / f"{found['code_digest']}.o").read_bytes()

    before = built()
    (tmp_path / "vendor.h").write_bytes((tmp_path / "vendor.h").read_bytes() + b"// Nothing that counts.\n")
    assert built() == before
    (tmp_path / "vendor.h").write_bytes((tmp_path / "vendor.h").read_bytes() + b"enum { kMore };\n")
    assert [new == old for new, old in zip(built(), before, strict=True)] == [False, False, True]


@pytest.mark.slow
def test_attention_by_cudnn_links_and_says_what_is_missing_without_a_device(tmp_path: Path) -> None:
    mod = canonical.lower(rule_of("attention", ATTENTION))
    called = library_attention.apply(mod, {"library": "cudnn", "version": "9.19", "engine": 0}, load_arch(STANDARD, "h200"))
    compiled = cuda.compile_cuda_object(cpu.scheduled_module(mod, called).mod, load_arch(STANDARD, "h200"), "kd_a", LocalStore(tmp_path))
    assert compiled.launches == ()
    (tmp_path / "a.o").write_bytes(compiled.content)
    LINKERS["cuda"](tmp_path / "a.so", [tmp_path / "a.o"])
    assert load_library(tmp_path / "a.so").implements_function("kd_a")


def test_attention_by_cudnn_says_what_is_missing_without_it(tmp_path: Path) -> None:
    """Call it from host code alone, on a machine that lacks cuDNN or a driver, or has another release."""
    rule = rule_of("attention", ATTENTION)
    mod, params = canonical.lower(rule), {"library": "cudnn", "version": "9.0", "engine": 0}
    called = library_attention.apply(mod, params, load_arch(STANDARD, "h200"))
    (tmp_path / "a.o").write_bytes(cpu.compile_object(cpu.scheduled_module(mod, called).mod, detect(), "kd_host"))
    LINKERS["cpu"](tmp_path / "a.so", [tmp_path / "a.o"])
    arguments = [np.zeros(arg.shape, "float16") for arg in (*rule.signature().inputs, *rule.signature().outputs)]
    wanted = r'cuDNN is missing: pip install "nvidia-cudnn-cu13==9\.0\.\*"|is no NVIDIA driver|this kernel was tuned with 9\.0'
    with pytest.raises(RuntimeError, match=wanted):
        kernel_of(load_library(tmp_path / "a.so"), "kd_host")(*arguments)
