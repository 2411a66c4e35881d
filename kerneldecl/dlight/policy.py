"""Owns policies as objects for one function and one GPU, and the configurations that they emit.

Knows nothing of builds or measurements; kerneldecl.policies decides what is proposed, and in which order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kerneldecl.diagnostics.messages import show, unknown
from kerneldecl.diagnostics.units import duration
from kerneldecl.dlight.device import CUDA, Target
from kerneldecl.dlight.tensorize import Tags, output_dims, space_of, why_not
from kerneldecl.model import Arch, Candidate, Proposal, Value
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_module
from kerneldecl.plugins.policy_order import standard_order
from kerneldecl.policies import gpu_matmul, gpu_matmul_tc

_TENSOR_CORES = ("gpu_matmul", "gpu_matmul_tc")
_ON_TENSOR_CORES = tuple(name for policy in gpu_matmul.ON_TENSOR_CORES for name in policy.TEMPLATES)


@dataclass(frozen=True)
class Config:
    """A candidate, and the time that the policy's model predicts for it."""

    candidate: Candidate
    predicted_secs: float

    @property
    def params(self) -> dict[str, Value]:
        return dict(self.candidate.params)

    def __repr__(self) -> str:
        return f"{self.candidate!s}, {duration(self.predicted_secs)} expected"

    def to_json(self) -> dict[str, Any]:
        return {**self.candidate.to_json(), "predicted_secs": self.predicted_secs}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Config:
        """Read what `to_json` wrote; raise KeyError or TypeError otherwise."""
        return cls(Candidate.from_json(json), float(json["predicted_secs"]))

    def arch_of(self, arch: Arch) -> Arch:
        """Return the arch that this configuration is built for: without cp.async where that is switched off."""
        if self.params.get("use_async_copy", True):
            return arch
        return replace(arch, gpu=replace(arch.the_gpu, async_copy=False))


class DefaultPolicy:
    """Proposes schedules for CUDA cores, by the first of kerneldecl's policies that proposes any, else by the fallback."""

    def __init__(self, func: Any, arch: CUDA | Target, tags: Tags | None = None) -> None:
        """Raise ValueError for a function that is already scheduled, of dynamic shape or not made of plain blocks."""
        self.arch = arch if isinstance(arch, CUDA) else CUDA(arch)
        self.tags = dict(tags or {})
        self._space = space_of(func)
        _check_known(self.tags, ())

    def emit_config(self, topk: int = 20) -> list[Config]:
        """Return up to `topk` distinct configurations, best first by the policy's model."""
        for name in standard_order("cuda"):
            proposals = () if name in _TENSOR_CORES else load_module("policies", STANDARD, name).propose(self._space, self.arch.arch, topk)
            if proposals:
                return [Config(proposal.candidate, proposal.predicted_secs) for proposal in proposals]
        raise AssertionError("gpu_fallback takes every function")


class TensorCorePolicy:
    """Proposes schedules of GEMMs for tensor cores, and traceless functions where the GPU has wgmma, within the limits of the tags."""

    def __init__(self, func: Any, arch: CUDA | Target, tags: Tags | None = None) -> None:
        """Raise ValueError where tensor cores cannot run the function, or a tag is unknown or has an impossible value.

        Tags, all optional: `tensorcore_config`, the dimensions of the GEMM's output that m and n index; `pipeline_stage`, the number
        of stages in shared memory; `use_async_copy`, 0 or 1, whether they are loaded by cp.async; `use_wgmma`, 0 or 1, whether TIRx
        functions may be proposed. Nor are they proposed where `pipeline_stage` is given or `use_async_copy` is 0.
        """
        self.arch = arch if isinstance(arch, CUDA) else CUDA(arch)
        self.tags = dict(tags or {})
        self._space = space_of(func)
        if reason := why_not(self._space, self.arch):
            raise ValueError(f"tensor cores cannot run the function: {reason}; use DefaultPolicy")
        _check_known(self.tags, ("tensorcore_config", "pipeline_stage", "use_async_copy", "use_wgmma"))
        self._check_values()

    def _check_values(self) -> None:
        dims = output_dims(self._space)
        if list(self.tags.get("tensorcore_config", dims)) != dims:
            raise ValueError(f"tensorcore_config is {self.tags['tensorcore_config']}, but m and n index dimensions {dims} of the output")
        stages = self.tags.get("pipeline_stage", 1)
        if type(stages) is not int or stages < 1:
            raise ValueError(f"pipeline_stage is {show(stages)}; expected an integer above 0")
        for name in ("use_async_copy", "use_wgmma"):
            if (value := self.tags.get(name, 0)) not in {0, 1}:
                raise ValueError(f"{name} is {show(value)}; expected 0 or 1")
        if self.tags.get("use_async_copy", 0) and not self.arch.gpu.async_copy:
            raise ValueError(f"use_async_copy is 1, but {self.arch.arch.name} has no cp.async")

    def emit_config(self, topk: int = 20) -> list[Config]:
        """Return up to `topk` distinct configurations, best first by the policy's model; none if no tile has so many stages."""
        stages = self.tags.get("pipeline_stage")
        space, arch = self._space, self.arch.arch
        if stages:
            proposals = gpu_matmul_tc.with_stages(space, arch, topk, stages)
        elif self.tags.get("use_wgmma", 1) and self.tags.get("use_async_copy", 1):
            # Of twice as many, enough use tensor cores: three of four candidates are the best policy's.
            found = gpu_matmul.propose(space, arch, 2 * topk)
            proposals = tuple(each for each in found if each.candidate.template in _ON_TENSOR_CORES)[:topk]
        else:
            proposals = gpu_matmul_tc.propose(space, arch, topk)
        return [self._config(proposal) for proposal in proposals]

    def _config(self, proposal: Proposal) -> Config:
        asked = {"use_async_copy": False} if self.tags.get("use_async_copy") == 0 else {}
        candidate = Candidate.of(proposal.candidate.template, {**dict(proposal.candidate.params), **asked})
        return Config(candidate, proposal.predicted_secs)


def _check_known(tags: Tags, known: tuple[str, ...]) -> None:
    for name in tags:
        if name not in known:
            sentence, hint = unknown("tag", name, known)
            raise ValueError(f"{sentence}; {hint}" if hint else sentence)
