"""A user's program is checked by `mypy --strict` against the public interface: right ones pass, wrong ones are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import REPOSITORY

PROGRAM = """\
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kerneldecl
from kerneldecl.api import measure_bundle
from kerneldecl.errors import KerneldeclError, TuningError
from kerneldecl.model import Arch, Candidate, IterSpace, Proposal
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature


def tuned(folder: Path) -> dict[str, kerneldecl.Artifact]:
    try:
        return kerneldecl.build(folder, ["tag:fast"], jobs=2)
    except TuningError as error:
        raise SystemExit(str(error)) from None


def project(artifact: kerneldecl.Artifact, a: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    kernel = artifact["projection"]
    out: npt.NDArray[np.float32] = kernel(a)
    return out


@dataclass(frozen=True)
class Doubled(Rule):
    n: Extent
    dtype: FloatDtype = "float32"

    def signature(self) -> Signature:
        return Signature((Arg("x", (self.n,), self.dtype),), (Arg("y", (self.n,), self.dtype),))

    def reference(self, *inputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return inputs[0] * 2

    def flops(self) -> int:
        return self.n


def propose(space: IterSpace, arch: Arch, top_k: int) -> Sequence[Proposal]:
    lanes = arch.the_cpu.vector_bytes // 4
    return [Proposal(Candidate.of("rows", {"lanes": lanes}), 1e-6)][:top_k]


names: list[str] = [entry.entry for entry in kerneldecl.plan().entries]
loaded: kerneldecl.Artifact = kerneldecl.load("dist/net-0.1.0", threads=2)
dispatch = loaded.dispatch("projection", fallback=lambda a: a)
measured = measure_bundle(Path("net.bundle"))
failure: type[Exception] = KerneldeclError
"""
WRONG = {
    "a number as a path": ("kerneldecl.load(3)", "arg-type"),
    "an unknown option": ('kerneldecl.build(".", cores=2)', "call-arg"),
    "a name that is not there": ("kerneldecl.tune()", "attr-defined"),
    "a dtype that no rule knows": ('Doubled(n=8, dtype="half")', "arg-type"),
    "an artifact's kernels by number": ("loaded[3]", "index"),
}


@pytest.mark.slow
def test_programs_are_checked_against_the_public_interface(tmp_path: Path) -> None:
    """One run of mypy, which reads all that the package imports: each wrong line has its error, and no other line has one."""
    assert (REPOSITORY / "kerneldecl/py.typed").is_file()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "".join(f"{line}\n" for line, _ in WRONG.values()), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "--no-error-summary", program.name]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False
    )
    of_program = [line for line in done.stdout.splitlines() if line.startswith("program.py:") and ": error:" in line]
    first = PROGRAM.count("\n") + 1
    expected = [(first + at, code) for at, (_, code) in enumerate(WRONG.values())]
    found = [(int(line.split(":")[1]), line.rpartition("[")[2].rstrip("]")) for line in of_program]
    assert found == expected, done.stdout
