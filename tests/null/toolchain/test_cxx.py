"""Which compiler links: this machine's, or the cross compiler for the machine that objects are for."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from support.spaces import Space

from kerneldecl.errors import ToolchainError
from kerneldecl.toolchain import cxx


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is all of PATH, with a compiler for this machine, which says so in place of linking."""
    folder = tmp_path / "tools"
    folder.mkdir()
    _tool(folder, "g++")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "here", "6.1", "#1", "x86_64")))
    return folder


def _tool(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho 'error: {name} was asked' >&2; exit 1\n", encoding="utf-8")
    path.chmod(0o755)


def _object(folder: Path, machine: int) -> Path:
    path = folder / "kernel.o"
    path.write_bytes(struct.pack("<16sHH", b"\x7fELF\x02\x01\x01", 1, machine))
    return path


@pytest.mark.parametrize(("machine", "asked"), [(62, "g++"), (183, "aarch64-linux-gnu-g++")], ids=["x86-64", "aarch64"])
def test_objects_are_linked_by_the_compiler_for_their_machine(tools: Path, tmp_path: Path, machine: int, asked: str) -> None:
    _tool(tools, "aarch64-linux-gnu-g++")
    with pytest.raises(ToolchainError, match=f"error: {asked.replace('+', '[+]')} was asked$"):
        cxx.link_shared_library(tmp_path / "kernels.so", [_object(tmp_path, machine)])


def test_a_missing_cross_compiler_is_named_with_its_package(tools: Path, tmp_path: Path) -> None:
    _tool(tools, "clang++")
    with pytest.raises(ToolchainError) as raised:
        cxx.link_shared_library(tmp_path / "kernels.so", [_object(tmp_path, 183)])
    missing = "no cross compiler for aarch64 on PATH (looked for aarch64-linux-gnu-g++)"
    assert str(raised.value) == f"{missing}; install one, e.g. `apt-get install g++-aarch64-linux-gnu`"


def test_a_build_for_a_cpu_that_nothing_links_for_stops_before_it_compiles(fakes: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.edit("archs/test-cpu.toml", 'mcpu = "x86-64-v2"', 'mcpu = "neoverse-n1"\nmtriple = "aarch64-linux-gnu"')
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolchainError, match=r"^small@box: no cross compiler for aarch64 on PATH .*PATTERNS` builds other entries alone$"):
        fakes.build()
