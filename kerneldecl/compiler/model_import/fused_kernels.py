"""Owns whether the policies of an arch propose a fused kernel for a rule, and the forms of a model that targets need for their answers.

Knows nothing of which rules are asked for, nor of GPU generations: policies know what they serve.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import tvm

from kerneldecl.compiler import canonical
from kerneldecl.compiler.graph.rule_use import Fuses
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.model_import import read_model
from kerneldecl.model import FALLBACKS, Arch, Policy
from kerneldecl.plugins.load import load_module
from kerneldecl.plugins.policy_order import ranking_policies
from kerneldecl.rule import Rule


class Form(NamedTuple):
    """A model after fusion, and the targets that deploy it so; no targets stand for all."""

    targets: tuple[str, ...]
    mod: tvm.IRModule


def by_policies(root: Path, arch: Arch, policy: Policy = "auto") -> Fuses:
    """Return what says of a rule whether a policy proposes a kernel for it on an arch that is not the fallback."""

    @functools.cache
    def fuses(rule: Rule) -> bool:
        space = iter_space(canonical.lower(rule))
        policies = (load_module("policies", root, name) for name in ranking_policies(root, policy, arch.kind))
        return any(each.candidate.template not in FALLBACKS for found in policies for each in found.propose(space, arch, 1))

    return fuses


def forms(mod: tvm.IRModule, by_target: Mapping[str, Fuses]) -> list[Form]:
    """Return a model after fusion, once for all targets that have fused kernels for the same of its parts."""
    if not by_target:
        return [Form((), read_model.fused(mod))]
    asked: dict[Rule, None] = {}
    found: dict[frozenset[Rule], Form] = {}
    for target, fuses in by_target.items():
        kept = frozenset(rule for rule in asked if fuses(rule))
        if found and kept in found:
            found[kept] = found[kept]._replace(targets=(*found[kept].targets, target))
            continue
        form = Form((target,), read_model.fused(mod, fuses=_noting(fuses, asked)))
        found[frozenset(rule for rule in asked if fuses(rule))] = form
    forms = list(found.values())
    return [Form((), forms[0].mod)] if len(forms) == 1 else forms


def _noting(fuses: Fuses, asked: dict[Rule, None]) -> Fuses:
    def noted(rule: Rule) -> bool:
        asked[rule] = None
        return fuses(rule)

    return noted
