"""Owns the proof that a function is what an entry of a standard rule computes: both have one canonical TensorIR.

Knows nothing of models, of files of the workspace or of schedules.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import tvm

from kerneldecl import plugins
from kerneldecl.attributes import RuleAttributes, rule_attributes
from kerneldecl.compiler import tensorir
from kerneldecl.model import Arg, Value
from kerneldecl.proposals import Proposal, proposals

_FLOAT = re.compile(r"T\.b?float\d+\(([-+.e\d]+)\)")


def recognised(mod: tvm.IRModule, root: Path) -> tuple[Proposal, dict[str, Value]] | None:
    """Return the standard rule that computes what a canonical module does, and all its attributes; None where none does.

    A rule that the workspace at `root` has a file of its own for may compute anything: it is not tried.
    """
    text = tensorir.canonical_text(mod)
    args = [Arg(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(tensorir.signature_of(mod["main"]))]
    for proposal in proposals(args, _constants(text)):
        if plugins.shadowed(root, proposal.rule):
            continue
        known = _standard(proposal.rule)
        if any(known.attributes[name].read(value)[1] for name, value in proposal.attrs.items()):
            continue  # a dtype, say, that the rule does not take
        instance = known.rule(**proposal.attrs)
        if not any(instance.problems()) and tensorir.canonical_text(tensorir.lower(instance)) == text:
            return proposal, dict(zip(known.names, known.values(instance), strict=True))
    return None


@functools.cache  # of hundreds of proposals
def _standard(rule: str) -> RuleAttributes:
    return rule_attributes(plugins.STANDARD, rule)


def _constants(text: str) -> set[float]:
    return {float(number) for number in _FLOAT.findall(text)}
