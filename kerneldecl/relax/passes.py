"""Owns the pass that puts an artifact's kernels into a Relax module, the default pipeline with it, and the pass of shape buckets.

Knows nothing of how functions and kernels are matched, nor of loading what was compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import tvm
import tvm_ffi
from tvm import relax

from kerneldecl.compiler.canonical import lower
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.dynamic_shapes import Buckets, with_shape_buckets
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.compiler.graph.pipeline import FUSED_PASSES, graph_passes
from kerneldecl.compiler.nvcc_callback import compile_device_code
from kerneldecl.compiler.prim_funcs import in_place_of
from kerneldecl.errors import ArtifactError, UnmatchedError
from kerneldecl.relax.calls import called_by_symbol
from kerneldecl.relax.default_schedules import DefaultSchedules
from kerneldecl.relax.detach_weights import DetachWeights, Weights
from kerneldecl.relax.matching import Report, match
from kerneldecl.relax.prebuilt import Kernel, read_prebuilt
from kerneldecl.relax.verification import verification
from kerneldecl.rule import Rule

TIR_PIPELINE = PIPELINE
"""The `tir_pipeline` that `relax.build` and `tvm.compile` need where a kernel is a traceless TIRx function; it works for every model."""
_LOG = logging.getLogger(__name__)
Mode = Literal["schedule", "binary"]
for _error in (ArtifactError, UnmatchedError):
    tvm_ffi.register_error(_error.__name__, _error)  # TVM calls passes from C++: unregistered errors become RuntimeError


@tvm.transform.module_pass(opt_level=0, name="ApplyArtifact")
class ApplyArtifact:
    """Replaces the functions of a module that an artifact has kernels for; `ApplyArtifact(…)(mod)` returns the module.

    Mode "schedule" replaces a function by its tuned schedule and marks it scheduled; the model is compiled as usual, but with
    `tir_pipeline=TIR_PIPELINE` if the artifact has traceless TIRx kernels, which TVM's own pipeline refuses. Mode "binary" has
    the model call the prebuilt kernel by its symbol, which is loaded with the model (`load_model`) or linked into it
    (`export_model`); a function that is called otherwise than by call_tir gets the schedule. Other functions stay as they
    are, for the passes that follow. `report` holds the match of each function of the last module.
    """

    report: Report | None = None

    def __init__(
        self, artifact: str | Path, mode: Mode = "schedule", strict: bool = False, target: tvm.target.Target | None = None
    ) -> None:
        """Take an artifact's folder; the target is by default the one that is current when the pass runs.

        The pass raises ArtifactError for an artifact that is damaged or was built for another target, and, if `strict`,
        UnmatchedError where an unscheduled function has no kernel, unless only shapes outside of `ShapeBuckets` call it.
        """
        if mode not in get_args(Mode):
            raise ValueError(f'mode "{mode}" is unknown; expected "schedule" or "binary"')
        self.artifact, self.mode, self.strict, self.target = artifact, mode, strict, target

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        target = self._target()
        self.report = match(mod, read_prebuilt(self.artifact, target), self._arch(target), is_linked=self.mode == "binary")
        if self.strict and self.report.missed:
            raise UnmatchedError(str(self.report))
        _LOG.info("%s", self.report)
        return scheduled(mod, self.report.hits) if self.mode == "schedule" else _called(mod, self.report.hits, target)

    def fuses(self, rule: Rule) -> bool:
        """Say whether the artifact has a kernel for a rule: what `graph_passes` asks of whole attentions and of weights in panels."""
        target = self._target()
        wanted, arch = match_digest(lower(rule)["main"]), self._arch(target)
        kernels = (kernel for kernel in read_prebuilt(self.artifact, target).kernels if kernel.digest == wanted)
        return any(not arch or kernel.arch in {"", arch} for kernel in kernels)

    def _target(self) -> tvm.target.Target:
        target = self.target or tvm.target.Target.current(allow_none=True)
        if target is None:
            raise ValueError("ApplyArtifact has no target; run it under `with target:` or give it one")
        return target

    def _arch(self, target: tvm.target.Target) -> str:
        """Return the arch that schedules are compiled for; empty where kernels are compiled already."""
        return "" if self.mode == "binary" else str(target.attrs.get("arch", ""))


def scheduled(mod: tvm.IRModule, kernels: Mapping[str, Kernel]) -> tvm.IRModule:
    """Return the module with functions, by their names, replaced by kernels' schedules and marked scheduled."""
    fresh = mod.clone()
    for name, kernel in kernels.items():
        fresh.update_func(mod.get_global_var(name), in_place_of(mod[name], kernel.scheduled))
    return fresh


def _called(mod: tvm.IRModule, kernels: Mapping[str, Kernel], target: tvm.target.Target) -> tvm.IRModule:
    # Functions that remain are called in another way, or from outside.
    left = called_by_symbol(mod, {name: kernel.symbol for name, kernel in kernels.items()})
    names = {var.name_hint for var in left.functions}
    arch = str(target.attrs.get("arch", ""))
    return scheduled(
        left, {name: kernel for name, kernel in kernels.items() if name in names and kernel.arch in {"", arch} and not kernel.calls_library}
    )


def pipeline(
    artifact: str | Path,
    target: tvm.target.Target,
    mode: Mode = "schedule",
    *,
    strict: bool = False,
    verify: bool = True,
    detach_weights: bool = False,
) -> Pipeline:
    """Return the default passes of `relax.build(mod, target, relax_pipeline=…, tir_pipeline=TIR_PIPELINE)` with an artifact's kernels.

    The passes are `graph_passes` with the attentions that the artifact has kernels for, library dispatch, fusion, the artifact, TVM's
    default schedules of other functions, or plain ones where these fail, and lowering to the virtual machine. With `verify`, a
    function that TVM compiles is run here on random inputs, as far as its target is here, and compared with its reference. The
    result's `report` holds the match of each function and how it is compiled, once a model was built with it. With `detach_weights`
    its `weights` are those of the model, for `export_model` to write beside the library, and the library says what inputs it takes.
    """
    if target.kind.name == "cuda":
        compile_device_code(target)
    legalize = relax.pipeline.legalize_passes(target)
    fused = 1 + [each.info.name for each in legalize].index("FuseTIR")
    apply = ApplyArtifact(artifact, mode, strict=strict)
    detach = DetachWeights() if detach_weights else None
    default = _without_arch_suffix(target)
    others = DefaultSchedules(legalize[fused:], verification(default) if verify else None)
    steps = (
        ((*graph_passes(apply.fuses), *relax.pipeline.library_dispatch_passes(target), *legalize[:fused], *FUSED_PASSES, apply), target),
        ((others,), default),
        ((*((detach,) if detach else ()), *_lower_dataflow(), *relax.pipeline.finalize_passes(target)), target),
    )
    return Pipeline(steps, apply, others, detach)


@tvm.transform.module_pass(opt_level=0, name="ShapeBuckets")
class ShapeBuckets:
    """Gives a model of dynamic shape static copies for shape buckets: `ShapeBuckets({"n": (1, 16, 128)})(mod)` returns the module.

    Each public function then dispatches, by the shapes of its arguments, to a copy of itself of static shape, which an artifact may
    have kernels for, or to the dynamic copy for all other shapes, which it has none for. Run it before anything is lowered;
    `kerneldecl extract --dim n=1,16,128` declares the functions of the same copies.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        return with_shape_buckets(mod, self.buckets)


@tvm.transform.module_pass(opt_level=0, name="kerneldecl.pipeline")
class Pipeline:
    """Runs groups of passes in order, each under a target of its own; one is an artifact's, one schedules what that leaves."""

    def __init__(
        self,
        steps: Sequence[tuple[Sequence[tvm.transform.Pass], tvm.target.Target]],
        apply: ApplyArtifact,
        others: DefaultSchedules,
        detach: DetachWeights | None = None,
    ) -> None:
        self.steps, self.apply, self.others, self.detach = steps, apply, others, detach

    @property
    def report(self) -> Report | None:
        """The matches of the last module's functions, and how the others are compiled; None before there is one."""
        found = self.apply.report
        return found and replace(found, compiled=self.others.compiled)

    @property
    def weights(self) -> Weights | None:
        """The weights that were taken out of the last module."""
        return self.detach.weights if self.detach else None

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        for passes, target in self.steps:
            with target:
                mod = tvm.transform.Sequential(list(passes))(mod)
        return mod


def _without_arch_suffix(target: tvm.target.Target) -> tvm.target.Target:
    """Return the target with the arch name by which TVM's default schedules recognise tensor cores: sm_90 for sm_90a."""
    config = dict(target.export())
    return tvm.target.Target({**config, "arch": str(config["arch"]).rstrip("af")}) if target.kind.name == "cuda" else target


def _lower_dataflow() -> list[tvm.transform.Pass]:
    """Return the passes that every backend of TVM 0.27 runs here; TVM's function for them fails, as no backend exports it."""
    lower = relax.transform
    return [lower.RewriteDataflowReshape(), lower.ToNonDataflow(), lower.RemovePurityChecking(), lower.CallTIRRewrite()]
