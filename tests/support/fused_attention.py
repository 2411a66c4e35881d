"""Owns a workspace's policy and template by which attention is one kernel on CPUs: the fallback's, under names of their own.

Knows nothing of models.
"""

from __future__ import annotations

from pathlib import Path

POLICY = '''\
"""Owns attention on CPUs as the fallback computes it."""

from kerneldecl.analysis.attention import attention_of
from kerneldecl.model import Candidate, Proposal
from kerneldecl.policies import cpu_fallback

TEMPLATES = ("fused_attention",)
AUTO = {"cpu": 1}


def propose(space, arch, top_k):
    if attention_of(space) is None:
        return ()
    found = cpu_fallback.propose(space, arch, top_k)
    return tuple(Proposal(Candidate.of("fused_attention", dict(each.candidate.params)), each.predicted_secs) for each in found)
'''
TEMPLATE = '''\
"""Owns attention on CPUs as the fallback schedules it.

Parameters:
  parallel   True distributes the outer spatial loops over all cores
  vectorize  True vectorizes the innermost spatial loop
"""

from kerneldecl.templates.cpu_fallback import apply  # noqa: F401
'''


def add_fused_attention(root: Path) -> None:
    """Add the policy and the template to a workspace."""
    for folder, text in (("policies", POLICY), ("templates", TEMPLATE)):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "fused_attention.py").write_text(text)
