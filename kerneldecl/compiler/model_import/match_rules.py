"""Owns the proof that a function is what an entry of a standard rule computes: both have one canonical TensorIR.

Knows nothing of models, of files of the workspace or of schedules.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import tvm

from kerneldecl.compiler import canonical
from kerneldecl.compiler.model_import.rule_candidates import Proposal, proposals
from kerneldecl.declare.rule_attributes import RuleAttributes, rule_attributes
from kerneldecl.model import Arg, Value
from kerneldecl.plugins.find import STANDARD, shadowed_file

_FLOAT = re.compile(r"T\.b?float\d+\(([-+.e\d]+)\)")


def recognised(mod: tvm.IRModule, root: Path) -> tuple[Proposal, dict[str, Value]] | None:
    """Return the standard rule that computes what a canonical module does, and all its attributes; None where none does.

    A rule that the workspace at `root` has a file of its own for may compute anything: it is not tried.
    """
    text, sums = canonical.canonical_text(mod), _sums(mod)
    args = [Arg(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(canonical.signature_of(mod["main"]))]
    # Most proposals compute other sums, whatever their epilogue: those that differ in it alone are told by one of them.
    has_sums: dict[str, bool] = {}
    for proposal in proposals(args, _constants(text)):
        if shadowed_file("rules", root, proposal.rule):
            continue
        known = _standard(proposal.rule)
        if any(known.attributes[name].read(value)[1] for name, value in proposal.attrs.items()):
            continue  # a dtype, say, that the rule does not take
        instance = known.rule(**proposal.attrs)
        if any(instance.problems()):
            continue
        family = str((proposal.rule, {name: value for name, value in proposal.attrs.items() if name != "epilogue"}))
        if not has_sums.get(family, True):
            continue
        lowered = canonical.lower(instance)
        if canonical.canonical_text(lowered) == text:
            return proposal, dict(zip(known.names, known.values(instance), strict=True))
        has_sums[family] = _sums(lowered) == sums
    return None


@functools.cache  # of hundreds of proposals
def _standard(rule: str) -> RuleAttributes:
    return rule_attributes(STANDARD, rule)


def _sums(mod: tvm.IRModule) -> set[str]:
    """Return the loop nests that reduce, each as canonical text of its own."""
    found = (nest for nest in canonical.nests(mod) if any("T.init()" in line for line in nest))
    return {"\n".join(canonical.canonical_lines(nest)) for nest in found}


def _constants(text: str) -> set[float]:
    return {float(number) for number in _FLOAT.findall(text)}
