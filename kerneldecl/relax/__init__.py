"""kerneldecl.relax: Relax models that use an artifact's kernels.

The pass and the pipeline need TVM's compiler, `load_model` only its runtime: each is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kerneldecl.compiler.graph.float32_accumulation import AccumulateInFloat32
    from kerneldecl.compiler.graph.pipeline import FUSED_PASSES, GRAPH_PASSES, graph_passes
    from kerneldecl.compiler.model_import.half_precision import HalfPrecision
    from kerneldecl.compiler.model_import.read_model import read_model
    from kerneldecl.relax.default_schedules import DefaultSchedules
    from kerneldecl.relax.deployment import Model, export_model, load_model
    from kerneldecl.relax.matching import Match, Report
    from kerneldecl.relax.passes import TIR_PIPELINE, ApplyArtifact, ShapeBuckets, pipeline
    from kerneldecl.relax.prebuilt import target_of
    from kerneldecl.relax.use_libraries import UseLibraries

__all__ = [
    "FUSED_PASSES",
    "GRAPH_PASSES",
    "TIR_PIPELINE",
    "AccumulateInFloat32",
    "ApplyArtifact",
    "DefaultSchedules",
    "HalfPrecision",
    "Match",
    "Model",
    "Report",
    "ShapeBuckets",
    "UseLibraries",
    "export_model",
    "graph_passes",
    "load_model",
    "pipeline",
    "read_model",
    "target_of",
]
_MODULES = {
    "FUSED_PASSES": "compiler.graph.pipeline",
    "GRAPH_PASSES": "compiler.graph.pipeline",
    "graph_passes": "compiler.graph.pipeline",
    "AccumulateInFloat32": "compiler.graph.float32_accumulation",
    "HalfPrecision": "compiler.model_import.half_precision",
    "read_model": "compiler.model_import.read_model",
    "TIR_PIPELINE": "passes",
    "ApplyArtifact": "passes",
    "DefaultSchedules": "default_schedules",
    "Match": "matching",
    "Model": "deployment",
    "Report": "matching",
    "ShapeBuckets": "passes",
    "UseLibraries": "use_libraries",
    "export_model": "deployment",
    "load_model": "deployment",
    "pipeline": "passes",
    "target_of": "prebuilt",
}


if not TYPE_CHECKING:  # or a type checker would believe that every name is there

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'kerneldecl.relax' has no attribute {name!r}")
        module = _MODULES[name]
        return getattr(importlib.import_module(f"kerneldecl.{'' if '.' in module else 'relax.'}{module}"), name)
