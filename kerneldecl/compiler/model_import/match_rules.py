"""Owns the proof that an entry of a standard rule computes a function: both have the same canonical TensorIR.

Knows nothing of models, of files of the workspace or of schedules.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import tvm

from kerneldecl.compiler import canonical
from kerneldecl.compiler.model_import.rule_candidates import RuleCandidate, rule_candidates
from kerneldecl.declare.rule_attributes import RuleAttributes, rule_attributes
from kerneldecl.model import Arg, Value
from kerneldecl.plugins.find import STANDARD, shadowed_file

_FLOAT = re.compile(r"T\.b?float\d+\(([-+.e\d]+)\)")


def matching_rule(mod: tvm.IRModule, root: Path, likely: Sequence[RuleCandidate] = ()) -> tuple[RuleCandidate, dict[str, Value]] | None:
    """Return the standard rule that computes what a canonical module does, and all its attributes; None where none does.

    Candidates that are `likely` are tried first: the rule that a pass says the function was made of.

    A rule that the workspace at `root` overrides with a file of its own may compute anything: it is not tried.
    """
    text, reductions = canonical.canonical_text(mod), _reductions(mod)
    args = [Arg(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(canonical.signature_of(mod["main"]))]
    # Most candidates compute another reduction, whatever their epilogue: one of a family that differs in the epilogue alone is lowered.
    has_reductions: dict[str, bool] = {}
    for candidate in itertools.chain(likely, rule_candidates(args, _constants(text))):
        if shadowed_file("rules", root, candidate.rule):
            continue
        standard = _standard(candidate.rule)
        if any(standard.attributes[name].read(value)[1] for name, value in candidate.attrs.items()):
            continue  # a dtype, say, that the rule does not accept
        instance = standard.rule(**candidate.attrs)
        if any(instance.problems()):
            continue
        family = str((candidate.rule, {name: value for name, value in candidate.attrs.items() if name != "epilogue"}))
        if not has_reductions.get(family, True):
            continue
        lowered = canonical.lower(instance)
        if canonical.canonical_text(lowered) == text:
            return candidate, dict(zip(standard.names, standard.values(instance), strict=True))
        has_reductions[family] = _reductions(lowered) == reductions
    return None


@functools.cache  # hundreds of candidates share a rule
def _standard(rule: str) -> RuleAttributes:
    return rule_attributes(STANDARD, rule)


def _reductions(mod: tvm.IRModule) -> set[str]:
    """Return the loop nests with a reduction, each as canonical text of its own."""
    found = (nest for nest in canonical.nests(mod) if any("T.init()" in line for line in nest))
    return {"\n".join(canonical.canonical_lines(nest)) for nest in found}


def _constants(text: str) -> set[float]:
    return {float(number) for number in _FLOAT.findall(text)}
