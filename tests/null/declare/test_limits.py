"""Owns the tests of the table `[limits]`: its values, its mistakes, and that no key depends on it.

Knows nothing of processes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.spaces import ENTRIES, FAKES, HEAD, Space

from kerneldecl.declare.document import declare
from kerneldecl.declare.limits import LIMITS
from kerneldecl.errors import DeclarationError
from kerneldecl.limits import Limits


def declaring(root: Path, table: str) -> Space:
    return Space(root).write({**FAKES, "workloads.toml": HEAD + table + ENTRIES})


def test_limits_have_defaults_and_can_be_declared_one_by_one(tmp_path: Path) -> None:
    assert declare(declaring(tmp_path / "none", "").root).limits == Limits()
    some = declare(declaring(tmp_path / "some", "[limits]\nbuild_secs = 600\nmemory_gib = 1.5\n").root).limits
    assert some == dataclasses.replace(Limits(), build_secs=600.0, memory_gib=1.5)
    assert set(LIMITS) == {field.name for field in dataclasses.fields(Limits)}


@pytest.mark.parametrize(
    ("table", "line", "sentence"),
    [
        ("[limits]\nbuild_sec = 1\n", "build_sec", 'unknown key "build_sec"'),
        ("[limits]\nverify_secs = 0\n", "verify_secs", "verify_secs is 0; expected a number above 0"),
        ("[limits]\nmemory_gib = inf\n", "memory_gib", "memory_gib is inf; expected a number above 0"),
        ('[limits]\noutput_mib = "1"\n', "output_mib", 'output_mib is "1"; expected a number above 0'),
        ("[limits]\nsample_secs = true\n", "sample_secs", "sample_secs is true; expected a number above 0"),
    ],
)
def test_a_wrong_limit_is_a_mistake_with_its_line(tmp_path: Path, table: str, line: str, sentence: str) -> None:
    space = declaring(tmp_path / "space", table)
    with pytest.raises(DeclarationError) as caught:
        declare(space.root)
    (problem,) = caught.value.problems
    assert sentence in problem.sentence
    assert (space.root / "workloads.toml").read_text().splitlines()[problem.line - 1].startswith(line)


def test_no_key_depends_on_a_limit(tmp_path: Path) -> None:
    space = declaring(tmp_path / "space", "")
    space.build()
    declaring(space.root, "[limits]\nverify_secs = 1\nmemory_gib = 4\n")
    assert not space.plan().misses
