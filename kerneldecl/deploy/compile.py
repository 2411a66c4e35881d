"""Owns the way from a model to a library with an artifact's kernels in it, its weights beside it.

Knows nothing of the command line, nor of how kernels are tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import relax

from kerneldecl.relax.deployment import export_model
from kerneldecl.relax.matching import Report
from kerneldecl.relax.passes import TIR_PIPELINE, pipeline
from kerneldecl.relax.prebuilt import target_of


@dataclass(frozen=True)
class Compiled:
    """A library that was written."""

    library: Path
    report: Report
    """The kernel of each of the model's functions."""


def compile_module(mod: tvm.IRModule, artifact: Path, library: Path) -> Compiled:
    """Compile a Relax module for an artifact's target, with its kernels linked in."""
    target = target_of(artifact)
    passes = pipeline(artifact, target, "binary", detach_weights=True)
    executable = relax.build(mod, target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    export_model(executable, library, artifact, passes.weights)
    assert passes.report is not None, "relax.build has run the passes"
    return Compiled(library, passes.report)


def compile_unoptimised(mod: tvm.IRModule, library: Path) -> Path:
    """Compile a Relax module for the CPU without any optimisation of code, as a reference."""
    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
    executable = relax.build(mod, target)
    executable.export_library(str(library))
    return library
