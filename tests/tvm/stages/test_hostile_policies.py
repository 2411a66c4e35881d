"""Owns the tests of policies that loop, raise, end their process, print or answer nonsense: they fail their entries, and the build goes on.

Knows nothing of how policies are asked.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.spaces import REAL, Space

HEAD = REAL["workloads.toml"].partition("[[workload]]")[0]
POLICIES = {
    "loops": "while True:\n        pass",
    "raises": 'print("about to fail")\n    return 1 / 0',
    "exits": "import os\n    os._exit(0)",
    "answers": "return [1, 2]",
    "floods": "from kerneldecl.model import Candidate as C, Proposal as P\n    return (P(C.of('plain', {}), 1e-6) for n in iter(int, 1))",
    "gpu": "return (arch.the_gpu,)",
}
AT_IMPORT = {"import_loops": "while True:\n    pass\n", "import_exits": "import os\nos._exit(0)\n"}
REASONS = {
    "loops": "took more than 5 s",
    "raises": "policies/raises.py:6: propose() of policy raises fails: ZeroDivisionError: division by zero",
    "exits": "its process ended with exit code 0",
    "answers": "policies/answers.py: propose() of policy answers fails: TypeError: it gives a int among its proposals",
    "gpu": "policies/gpu.py:5: propose() of policy gpu fails: TuningError: arch host is a CPU",
    "import_loops": "took more than 5 s",
    "import_exits": "its process ended with exit code 0",
}


def entry(policy: str, n: int) -> str:
    return f'[[workload]]\nname = "{policy}"\nrule = "elementwise"\nop = "relu"\nshape = [{n}, 32]\npolicy = "{policy}"\n\n'


@pytest.mark.slow
def test_a_policy_cannot_stop_the_build(tmp_path: Path) -> None:
    """Nor what it does when it is imported. Each fails its own entry, with file and line where there is one; the good one is linked."""
    space = Space(tmp_path / "policies")
    head = 'TEMPLATES = ("plain",)\n\n\ndef propose(space, arch, top_k):'
    files = {f"policies/{name}.py": f"{head}\n    {body}\n" for name, body in POLICIES.items()}
    files |= {
        f"policies/{name}.py": f'{body}TEMPLATES = ("plain",)\n\n\ndef propose(space, arch, top_k):\n    return ()\n'
        for name, body in AT_IMPORT.items()
    }
    limits = "[limits]\npropose_secs = 5\nmemory_gib = 2\n\n"
    named = ("plain", *REASONS, "floods")
    tables = "".join(entry(policy, n) for n, policy in enumerate(named, start=8))
    space.write({**REAL, **files, "workloads.toml": HEAD + limits + tables})
    space.run("check")
    done = space.run("-v", "build", code=1)
    manifest = json.loads((space.artifact() / "manifest.json").read_text())
    assert [each["name"] for each in manifest["entries"]] == ["plain"]
    assert set(manifest["missing"]) == {*REASONS, "floods"}
    for name, reason in REASONS.items():
        assert reason in manifest["missing"][name], name
    assert "  propose: about to fail" in done.stderr
    assert "about to fail" in (space.root / "cache" / "printed.log").read_text()
