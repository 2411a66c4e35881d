"""The commands `export`, `show --source` and `show --model`, as users run them on a built workspace."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.spaces import Space

import kerneldecl
from kerneldecl.toolchain.cxx import compiler

_SHIM = '#include "gemm.h"\nextern "C" int run(void* a, void* b, void* c) { return gemm((float*)a, (float*)b, (float*)c); }\n'


@pytest.fixture(scope="module")
def built(built_real: Space, tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace that is up to date, for commands that change nothing."""
    return built_real.copy_of(tmp_path_factory.mktemp("exported") / "real", "cache", "dist", "workloads.lock")


def test_a_program_calls_an_exported_entry(built: Space, tmp_path: Path) -> None:
    """The header of `export`, by g++ alone, gives what the artifact gives."""
    header = tmp_path / "new" / "gemm.h"
    assert built.run_here("export", "gemm", "-o", str(header)).stdout == f"wrote {header}\n"
    (header.parent / "shim.cpp").write_text(_SHIM)
    flags = next(line for line in header.read_text().splitlines() if line.startswith("// compile with: ")).split()[4:]
    subprocess.run([compiler(), *flags, "-shared", "-fPIC", "-o", "shim.so", "shim.cpp"], cwd=header.parent, check=True)
    drawn = np.random.default_rng(1)
    artifact = kerneldecl.load(built.artifact())
    (entry,) = (each for each in artifact.manifest["entries"] if each["name"] == "gemm")
    shapes = [each["shape"] for each in (*entry["inputs"], *entry["outputs"])]
    a, b, expected = (drawn.standard_normal(shape).astype("float32") for shape in shapes)
    found = np.zeros_like(expected)
    artifact["gemm"](a, b, expected)
    assert ctypes.CDLL(str(header.parent / "shim.so")).run(*(ctypes.c_void_p(each.ctypes.data) for each in (a, b, found))) == 0
    assert (found == expected).all()


@pytest.mark.slow
def test_an_artifact_carries_headers_if_they_are_declared(built: Space, tmp_path: Path) -> None:
    """The same headers as of `export`; one that the store has lost is written again, and another declaration is another artifact."""
    space = built.copy_of(tmp_path / "headers", "cache", "dist", "workloads.lock")
    plain = members(space)
    space.edit("workloads.toml", "[artifact]\n", "[artifact]\nheaders = true\n")
    space.run("build")
    exported = space.run("export", "gemm").stdout
    assert members(space)["include/gemm.h"].decode() == exported
    assert sum(name.startswith("include/") for name in members(space)) == 4
    for record in (space.root / "cache" / "local" / "header").iterdir():
        record.unlink()
    shutil.rmtree(space.root / "dist")
    space.run("build")
    assert members(space)["include/gemm.h"].decode() == exported
    space.edit("workloads.toml", "headers = true\n", "")
    space.run("build")
    assert members(space) == plain


def members(space: Space) -> dict[str, bytes]:
    with zipfile.ZipFile(space.artifact() / "kernels.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_what_cannot_be_exported_is_one_sentence(built: Space) -> None:
    assert "add selects 2 entries, and one is exported at a time" in built.run_here("export", "add*", code=2).stderr.replace("add*", "add")
    assert "gemm@host is for host: its formats are c, asm" in built.run_here("export", "gemm", "--format", "sass", code=2).stderr
    assert "a cubin is no text: name a file with -o" in built.run_here("export", "gemm", "--format", "cubin", code=2).stderr
    assert "--name '2x' is no name of a function in C++" in built.run_here("export", "gemm", "--name", "2x", code=2).stderr
    assert "--source shows one entry: name it" in built.run_here("show", "--source", code=2).stderr


def test_what_is_not_tuned_is_not_exported(real: Space) -> None:
    shutil.rmtree(real.root / "cache")
    assert "gemm@host is not tuned: run `kerneldecl build gemm@host` first" in real.run_here("export", "gemm", code=1).stderr


def test_show_prints_source_and_what_the_model_knew(built: Space) -> None:
    assert "static inline int gemm(const float* A, const float* B, float* C) {" in built.run_here("show", "gemm", "--source").stdout
    ranks = built.run_json_here("show", "--model", "gemm")
    (row,) = ranks["entries"]
    assert (row["entry"], row["policy"], row["timed"], max(row["best_of"])) == ("gemm@host", "plain", 2, 1.0)
    assert row["best_of"][row["rank_of_best"] - 1] == 1.0
    assert built.run_here("show", "--model", "gemm").stdout.splitlines()[-1].startswith("geometric mean of 1")
    assert built.run_here("check", "--model").stdout.startswith("4 entries with times, 0 in another order;")
