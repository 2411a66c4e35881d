"""Every entry that the repository declares for a GPU has candidates there, and the model's first choice is a kernel without spills."""

from __future__ import annotations

from pathlib import Path

import pytest

from kerneldecl.compiler import tensorir
from kerneldecl.compiler.codegen import apply_candidate
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.compiler.space import iter_space
from kerneldecl.declare import declare
from kerneldecl.model import Workload
from kerneldecl.plugins import load_arch, load_policy, load_rule
from kerneldecl.policies.auto import BY_KIND
from kerneldecl.stores.local import LocalStore

ROOT = Path(__file__).parents[2]
ARCH = load_arch(ROOT, "h200")
ENTRIES = [workload for workload in declare(ROOT).workloads if workload.target == "h200"]


@pytest.mark.parametrize("workload", ENTRIES, ids=lambda workload: workload.name)
def test_first_choice_compiles_without_spills(workload: Workload, tmp_path: Path) -> None:
    mod = tensorir.lower(load_rule(ROOT, workload.rule).of(ROOT, dict(workload.attrs)))
    space = iter_space(mod)
    proposed = next(filter(None, (load_policy(ROOT, name).propose(space, ARCH, workload.top_k, ()) for name in BY_KIND["cuda"])), ())
    assert len({proposal.candidate for proposal in proposed}) == len(proposed) > 1
    schedule = apply_candidate(ROOT, mod, proposed[0].candidate, ARCH)
    assert schedule is not None, proposed[0]
    made = compile_cuda_object(schedule.mod, ARCH, "kernel", LocalStore(tmp_path))
    assert sum(launch.usage.spill_bytes for launch in made.launches) == 0, proposed[0]
