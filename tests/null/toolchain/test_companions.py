"""C++ that is linked with kernels counts in the keys of those that call it: of what it means, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from kerneldecl.declare.document import Declaration
from kerneldecl.planning.workspace import workspace_of
from kerneldecl.plugins.digest import files_digest, plugin_files
from kerneldecl.plugins.find import STANDARD
from kerneldecl.toolchain import companions

VENDOR = STANDARD / "toolchain" / "vendor"


@pytest.fixture
def header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the header of a source that stands for cuDNN's attention, in a workspace with a template for it and one for convolutions."""
    (tmp_path / "templates").mkdir()
    for name, function in (("attention", "CUDNN_ATTENTION"), ("convolution", "CUDNN_CONV2D")):
        text = f"from kerneldecl.toolchain.companions import {function}\n"
        (tmp_path / "templates" / f"{name}.py").write_text(text, encoding="utf-8")
    source = '#include "call.h"\n#include <math.h>\nimport kerneldecl.policies.auto\n'  # of which nothing is followed as Python's
    (tmp_path / "call.cpp").write_text(source, encoding="utf-8")
    (tmp_path / "call.h").write_text("constexpr int kValue = 1;\n", encoding="utf-8")
    calls = {**companions.CALLS, companions.CUDNN_ATTENTION: (tmp_path / "call.cpp",)}
    monkeypatch.setattr(companions, "CALLS", MappingProxyType(calls))
    yield tmp_path / "call.h"
    companions._source_digest.cache_clear()


def keyed(header: Path) -> dict[str, str]:
    """Return digests of the two templates, and of an object that calls each of their functions."""
    root = header.parent
    companions._source_digest.cache_clear()
    objects = {"attention": companions.CUDNN_ATTENTION, "convolution": companions.CUDNN_CONV2D}
    templates = {name: files_digest(root, plugin_files("templates", root, name)) for name in objects}
    return {**templates, **{f"object of {name}": counted(function) for name, function in objects.items()}}


def counted(function: str) -> str:
    return companions.counted_with("found", b"\0%b\0" % function.encode())


@pytest.mark.parametrize(
    ("template", "sources"),
    [
        ("library_matmul", {"cublaslt.cpp", "openblas.cpp", "vendor.h"}),
        ("library_conv2d", {"cudnn.cpp", "cudnn.h", "vendor.h"}),
        ("library_attention", {"cudnn_attention.cpp", "cudnn.h", "vendor.h"}),
    ],
)
def test_the_sources_of_the_calls_that_a_template_makes_are_files_behind_it(template: str, sources: set[str]) -> None:
    assert {file.name for file in plugin_files("templates", STANDARD, template) if file.parent == VENDOR} == sources


def test_no_other_template_names_any_of_them() -> None:
    files = [file for file in (STANDARD / "templates").rglob("*.py") if "toolchain.companions" in file.read_text(encoding="utf-8")]
    assert {file.stem for file in files} == {"library_matmul", "library_conv2d", "library_attention", "openblas_gemm"}


def test_a_source_that_does_something_else_is_another_template_and_other_code(header: Path) -> None:
    before = keyed(header)
    header.write_text("constexpr int kValue = 2;\n", encoding="utf-8")
    after = keyed(header)
    assert {name for name in after if after[name] != before[name]} == {"attention", "object of attention"}


def test_a_comment_in_a_source_changes_no_key(header: Path) -> None:
    before = keyed(header)
    header.write_text("// One.\n\nconstexpr int kValue = 1;  /* the first\n that there is */\n", encoding="utf-8")
    assert keyed(header) == before


def test_a_source_and_what_it_includes_are_files_behind_a_template_as_they_are(header: Path) -> None:
    root = header.parent
    assert plugin_files("templates", root, "attention") == (root / "templates" / "attention.py", root / "call.cpp", header)


def test_what_calls_no_library_keeps_its_digest() -> None:
    assert companions.counted_with("found", b"\0__TVMBackendAllocWorkspace\0") == "found"
    assert companions.counted_with("found", b'T.call_extern("int32", "kerneldecl_openblas_gemm_1")') != "found"


def test_the_workspace_allocator_counts_where_kernels_for_gpus_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def linked() -> Mapping[str, str]:
        return workspace_of(tmp_path, Declaration("ops", "1", {}, (), (), tmp_path / "workloads.toml")).inputs.linked_with

    source = tmp_path / "pages.cpp"
    monkeypatch.setattr(companions, "WORKSPACE_ALLOCATOR", source)
    texts = ("int smallest = 4096;  // as TVM's\n", "int smallest = 4096;\n", "int smallest = 8192;\n")
    digests = [linked() for text in texts if source.write_text(text, encoding="utf-8")]
    assert [each.keys() for each in digests] == [{"cuda", "rows"}] * 3
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        (b'int a; // "one\nint b;\n', b"int a;\nint b;"),
        (b'text = "// none"; // one\n', b'text = "// none";'),
        (b"quote = '\"'; /* ' */ x();\n", b"quote = '\"';   x();"),
        (b'escaped = "\\"// none";\n', b'escaped = "\\"// none";'),
        (b'raw = R"(// none)"; // kept\n', b'raw = R"(// none)"; // kept\n'),
        (b"n = 1'000; // kept\n", b"n = 1'000; // kept\n"),
        (b"\xff // no UTF-8\n", b"\xff"),
    ],
)
def test_only_what_is_certainly_a_comment_is_left_out(source: bytes, meant: bytes) -> None:
    assert companions.meant(source) == meant


def test_the_sources_are_cut_and_not_taken_as_they_are() -> None:
    """Otherwise a comment in one of them would have all that was measured of it measured again."""
    files = [file for name in sorted(companions.VENDOR_CALLS) for file in companions.files_behind(name)]
    assert all(companions.meant(file.read_bytes()) != file.read_bytes() for file in files)
    assert {file for file in files if file.parent == VENDOR} == set(VENDOR.glob("*")) - {VENDOR / "__pycache__"}
