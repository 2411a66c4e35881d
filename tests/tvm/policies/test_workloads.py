"""Every entry that the repository declares for a GPU has candidates there, and the model's first choice can be scheduled."""

from __future__ import annotations

import pytest
from support.repository import REPOSITORY
from support.thinned import every

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.declare.document import declare
from kerneldecl.model import Workload
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import standard_order

ROOT = REPOSITORY
ARCH = load_arch(ROOT, "h200")
ENTRIES = [workload for workload in declare(ROOT).workloads if workload.target == "h200"]


@pytest.mark.parametrize("workload", every(5, [(workload,) for workload in ENTRIES]), ids=lambda workload: workload.name)
def test_first_choice_is_one_of_many_and_applies(workload: Workload) -> None:
    mod = canonical.lower(load_rule(ROOT, workload.rule).of(ROOT, dict(workload.attrs)))
    space = iter_space(mod)
    proposed = next(
        filter(None, (load_module("policies", ROOT, name).propose(space, ARCH, workload.top_k) for name in standard_order("cuda"))), ()
    )
    assert len({proposal.candidate for proposal in proposed}) == len(proposed) > 1
    assert apply_candidate(ROOT, mod, proposed[0].candidate, ARCH) is not None, proposed[0]
