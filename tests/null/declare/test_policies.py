"""Owns the tests of `policy` and `budget` in workloads.toml: what they become, and a sentence for each mistake.

Knows nothing of what policies propose.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kerneldecl.declare.document import declare
from kerneldecl.errors import DeclarationError
from kerneldecl.model import Workload, uses

HEAD = """
edition = 1
[artifact]
name = "a"
version = "1"
[target.host]
arch = "host"
[target.gpu]
arch = "h200"
"""
ENTRY = """
[[workload]]
name = "mm"
rule = "matmul"
m = 8
n = 8
k = 8
targets = ["host"]
"""


def workload(folder: Path, lines: str, head: str = HEAD) -> Workload:
    (folder / "workloads.toml").write_text(head + ENTRY + lines + "\n")
    return declare(folder).workloads[0]


def mistakes(folder: Path, lines: str, head: str = HEAD) -> list[str]:
    with pytest.raises(DeclarationError) as raised:
        workload(folder, lines, head)
    return [problem.sentence for problem in raised.value.problems]


def test_a_policy_is_a_name_or_several_with_their_options(tmp_path: Path) -> None:
    assert workload(tmp_path, "").policy == "auto"
    assert workload(tmp_path, 'policy = ["cpu_matmul"]').policy == "cpu_matmul"
    several = workload(tmp_path, 'policy = ["auto", { name = "random", trials = 9, seed = 1 }]')
    assert [(use.name, dict(use.options)) for use in uses(several.policy)] == [("auto", {}), ("random", {"trials": 9, "seed": 1})]


def test_an_entry_takes_policy_and_budget_of_the_defaults_unless_it_has_its_own(tmp_path: Path) -> None:
    head = HEAD + '[defaults]\npolicy = ["auto", "evolution"]\nbudget = { seconds = 60 }\n'
    given = workload(tmp_path, "", head)
    assert (given.policy, given.budget) == (("auto", "evolution"), (("seconds", 60.0),))
    own = workload(tmp_path, 'policy = "auto"\nbudget = { trials = 3, stop_at = 0.5 }', head)
    assert (own.policy, own.budget) == ("auto", (("stop_at", 0.5), ("trials", 3.0)))


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('policy = ["auto", "rondom"]', 'unknown policy "rondom"; expected one of'),
        ('policy = ["random", { name = "random", seed = 1 }]', "policy random stands twice in the list; expected each once"),
        ('policy = "gpu_matmul"', "policy gpu_matmul is for GPUs, and target host is a CPU"),
        ('policy = { name = "cpu_matmul", trials = 3 }', "policy cpu_matmul takes no options; top_k says how many candidates it proposes"),
        ('policy = { name = "random", trials = 0 }', "trials of policy random is 0; expected an integer above 0"),
        ('policy = { name = "random", seconds = 0 }', "seconds of policy random is 0; expected a number above 0"),
        ('policy = { name = "random", stop_at = 1.5 }', "stop_at of policy random is 1.5; expected a share above 0 and up to 1"),
        (
            'policy = { name = "random", sead = 1 }',
            'unknown option "sead" of policy random; expected one of seed, trials, seconds, stop_at',
        ),
        ('policy = { name = "random", seed = "x" }', 'policy random: seed is "x"; expected an integer'),
        ('policy = { name = "evolution", mutation = 2.0 }', "policy evolution: mutation is 2.0; expected a finite number of at least 0.0"),
        ('policy = "configs"', "policy configs: it tries nothing; give it configs"),
        (
            'policy = { name = "configs", configs = [] }',
            "policy configs: it tries nothing; give it configs = [{ template = …, … }] or grid",
        ),
        (
            'policy = { name = "configs", configs = [{ tile_m = 1 }] }',
            "policy configs: configs[0] has no template; write { template = NAME",
        ),
        (
            'policy = { name = "configs", grid = { template = "cpu_matmul" } }',
            "policy configs: its grid is empty; give it a list of values",
        ),
        ('policy = { name = "configs", grid = { template = "cpu_matmul", tile_m = [] } }', "policy configs: its grid is empty, for tile_m"),
        ('policy = { name = "configs", grid = { template = "cpu_matmul", tile_m = 1 } }', "policy configs: tile_m of its grid is no list"),
        ('policy = { name = "grid", values = {} }', "policy grid: its grid is empty; give it values = { parameter = [value, …] }"),
        ('policy = { name = "grid", values = { tile_m = [] } }', "policy grid: its grid is empty, for tile_m has no value"),
        ("policy = { trials = 3 }", "policy is {trials = 3}; expected a name of letters"),
        ("policy = []", "policy is []; expected a name of letters"),
        ("budget = {}", "budget is {}; expected a table such as { trials = 200"),
        ("budget = { trials = 0 }", "trials of budget is 0; expected an integer above 0"),
        ("budget = { minutes = 1 }", 'unknown key "minutes" of budget; expected one of trials, seconds, stop_at'),
    ],
)
def test_each_mistake_has_one_sentence(tmp_path: Path, lines: str, sentence: str) -> None:
    found = mistakes(tmp_path, lines)
    assert len(found) == 1
    assert found[0].startswith(sentence)


def test_seconds_for_all_entries_stand_in_the_budget_of_each(tmp_path: Path) -> None:
    head = HEAD + "[budget]\nseconds = 90\n"
    assert workload(tmp_path, "", head).budget == (("shared_seconds", 90.0),)
    assert workload(tmp_path, "budget = { trials = 3 }", head).budget == (("shared_seconds", 90.0), ("trials", 3.0))


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("[budget]\nseconds = 0\n", "seconds is 0; expected a number above 0"),
        ("[budget]\n", "seconds is missing; expected a number above 0"),
        ("[budget]\nseconds = 9\ntrials = 3\n", 'unknown key "trials"'),
    ],
)
def test_each_mistake_of_the_budget_of_all_has_one_sentence(tmp_path: Path, table: str, sentence: str) -> None:
    with pytest.raises(DeclarationError, match=re.escape(sentence)):
        workload(tmp_path, "", HEAD + table)


def test_a_default_policy_need_not_fit_targets_of_entries_that_have_their_own(tmp_path: Path) -> None:
    head = HEAD + '[defaults]\npolicy = "gpu_matmul"\n'
    assert workload(tmp_path, 'policy = "auto"', head).policy == "auto"
    assert mistakes(tmp_path, "", head) == ["policy gpu_matmul is for GPUs, and target host is a CPU"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", ("auto",)),
        ('dispatch = "tuned"', ("auto",)),
        ('dispatch = "fastest"', ("auto", "library")),
        ('dispatch = "library"', ("library",)),
        ('policy = ["evolution", "library"]\ndispatch = "fastest"', ("evolution", "library")),
    ],
)
def test_dispatch_says_whether_a_vendors_library_may_win(tmp_path: Path, lines: str, expected: tuple[str, ...]) -> None:
    assert tuple(use.name for use in uses(workload(tmp_path, lines).policy)) == expected


def test_dispatch_keeps_the_librarys_versions_and_is_that_of_the_entry_before_the_targets_before_the_defaults(tmp_path: Path) -> None:
    declared = 'policy = ["auto", { name = "library", cublas = "13.0" }]\ndispatch = "library"'
    assert [(use.name, dict(use.options)) for use in uses(workload(tmp_path, declared).policy)] == [("library", {"cublas": "13.0"})]
    head = HEAD.replace('arch = "host"', 'arch = "host"\ndispatch = "library"') + '[defaults]\ndispatch = "fastest"\n'
    assert workload(tmp_path, "", head).policy == "library"
    assert workload(tmp_path, 'dispatch = "tuned"', head).policy == "auto"
    assert workload(tmp_path, "", HEAD + '[defaults]\ndispatch = "fastest"\n').policy == ("auto", "library")


def test_mistakes_in_what_may_win_are_sentences(tmp_path: Path) -> None:
    assert mistakes(tmp_path, 'dispatch = "cublas"') == ['dispatch is "cublas"; expected tuned, library or fastest']
    wrong = mistakes(tmp_path, 'policy = { name = "library", cublas = "13.x" }')
    assert wrong == ['policy library: cublas is "13.x"; expected a version such as "13.1"']
    assert "cudnnn" in mistakes(tmp_path, 'policy = { name = "library", cudnnn = "9" }')[0]
