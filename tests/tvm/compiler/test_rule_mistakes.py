"""Owns the tests that what a rule's methods return is looked at before anything is made of it.

Knows nothing of mistakes that are seen without running the rule: `tests/support/mistakes.py` has those.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.spaces import REAL, Space

from kerneldecl.compiler.actions import lower

MISTAKES = {
    "an amount in words": (
        "return 2 * math.prod(self.shape)",
        'return "many"',
        r"Mine\.flops\(\) returns 'many'; expected a Python number",
    ),
    "NumPy's integer": (
        "return 2 * math.prod(self.shape)",
        "return np.prod(self.shape)",
        r"Mine\.flops\(\) returns np.int64\(128\); expected a Python number of at least 0",
    ),
    "no amount": ("return 2 * math.prod(self.shape)", "pass", r"Mine\.flops\(\) returns None; expected a Python number of at least 0"),
    "nothing computed": (
        "return [*inputs, te",
        "[*inputs, te",
        r"Mine\.lower\(\) returns None; expected a list of TE tensors, inputs then",
    ),
    "a tolerance below 0": (
        "    def flops",
        "    def tolerance(self):\n        return -1\n\n    def flops",
        r"Mine\.tolerance\(\) returns -1; expected a Python number of at least 0",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_what_a_rule_returns_is_told_with_the_method_and_what_is_expected(tmp_path: Path, what: str) -> None:
    old, new, says = MISTAKES[what]
    space = Space(tmp_path).write(REAL)
    assert space.command("new", "rule", "mine").code == 0
    space.edit("rules/mine.py", old, new)
    with pytest.raises((TypeError, ValueError), match=says):
        lower(str(tmp_path), "mine", {"shape": [16, 8]})
