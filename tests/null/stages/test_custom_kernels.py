"""Owns the tests of `specialize`: what is declared, what tunes again, who wins, and what is said of a file that is wrong.

Knows nothing of TVM: functions are lines of text.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.fakes import DieRunner
from support.spaces import Space

from kerneldecl.cli.report import show_json, show_text
from kerneldecl.declare.document import declare
from kerneldecl.errors import DeclarationError
from kerneldecl.plugins.digest import specialize_files
from kerneldecl.tuning.events import Note

OWN = """\
from ._words import WORD


def specialize(mod, arch):
    yield f"{mod} {WORD}"
"""


SMALL = 'name = "small"\nrule = "scale"\n'


@pytest.fixture
def own(fakes: Space) -> Space:
    """Return a workspace whose entry `small` has a function of the user's own."""
    fakes.edit("workloads.toml", SMALL, f'{SMALL}specialize = "own/small.py"\n')
    return fakes.write({"own/small.py": OWN, "own/_words.py": 'WORD = "by hand"\n'})


def without_proposals(space: Space) -> str:
    """Return the policy as it is when it proposes nothing."""
    return space.read("policies/plain.py").replace("UNROLLS =", "UNROLLS = ()  #")


def tuned(space: Space, name: str = "small") -> dict[str, str]:
    """Return the failure of each candidate of an entry, by what it is shown as; the winner is the first."""
    (entry,) = (entry for entry in space.plan().entries if entry.workload.name == name)
    assert entry.tuned is not None
    return {str(trial.candidate): trial.failure for trial in entry.tuned.trials}


def test_a_function_of_the_users_own_competes_and_can_win(own: Space) -> None:
    own.write({"policies/plain.py": without_proposals(own)})
    assert not own.build(patterns=["small"]).build.failures
    assert tuned(own) == {"specialize(variant=0)": ""}
    own.edit("policies/plain.py", "UNROLLS = ()  #", "UNROLLS =")
    assert not own.build(patterns=["small"]).build.failures
    assert set(tuned(own)) == {"specialize(variant=0)", *(f"unrolled(unroll={n})" for n in (1, 2, 4))}


def test_an_incorrect_kernel_is_reported_and_never_selected(own: Space) -> None:
    own.write({"own/_words.py": 'WORD = "wrong"\n'})
    built = own.build(patterns=["small"])
    assert not built.build.failures
    winner, *_ = found = tuned(own)
    assert winner.startswith("unrolled")
    assert found["specialize(variant=0)"].startswith("wrong: relative error 0.5")
    (note,) = (event.text for event in built.events if isinstance(event, Note))
    assert note.startswith("small@box: specialize(variant=0) of own/small.py: wrong: relative error 0.5")
    (entry,) = (entry for entry in own.plan().entries if entry.workload.name == "small")
    assert "specialize(…) are the custom kernels of own/small.py" in show_text(show_json(entry))


def test_a_file_without_kernels_is_reported(own: Space) -> None:
    own.write({"own/small.py": "def specialize(mod, arch):\n    return [None]\n"})
    built = own.build(patterns=["small"])
    assert [event.text for event in built.events if isinstance(event, Note)] == ["small@box: own/small.py gives no kernel for it"]
    assert set(tuned(own)) == {f"unrolled(unroll={n})" for n in (1, 2, 4)}


def test_where_no_candidate_is_right_the_entry_fails_with_the_reason(own: Space) -> None:
    own.write({"own/_words.py": 'WORD = "wrong"\n', "policies/plain.py": without_proposals(own)})
    assert own.build(patterns=["small"]).build.failures["small@box"].startswith("none of 1 candidates passed: wrong: relative error 0.5")


@pytest.mark.parametrize("name", ["own/small.py", "own/_words.py"])
def test_an_edit_of_the_file_or_of_what_it_imports_tunes_its_entry_alone(own: Space, name: str) -> None:
    assert not own.build().build.failures
    assert own.build(DieRunner()).links == 0
    own.write({name: f"{own.read(name)}REMARK = 1\n"})
    (action,) = (action for action in own.plan().misses if action.kind == "tune")
    assert action.entry == "small@box"
    assert [line for line, _, _ in action.changed] == ["templates.specialize"]
    built = own.build()
    assert {entry for kind, entry in built.ran if kind == "tune"} == {"small@box"}
    assert built.counts["verify"] == 0, "the code is known"
    own.write({"own/_words.py": 'WORD = "otherwise"\n'})
    assert own.build().counts["verify"] == 1


def test_a_standard_template_that_the_file_calls_is_one_of_its_files(own: Space) -> None:
    own.write({"own/small.py": "from kerneldecl.templates import cpu_matmul\n\n\ndef specialize(mod, arch):\n    return None\n"})
    first, *others = specialize_files(own.root, "own/small.py")
    assert first == own.root / "own/small.py"
    assert {"cpu_matmul.py", "contraction.py"} <= {path.name for path in others}, "and what the template imports"


def test_the_files_place_is_in_no_key(own: Space) -> None:
    assert not own.build().build.failures
    own.write({"mine/small.py": OWN, "mine/_words.py": own.read("own/_words.py")})
    own.edit("workloads.toml", "own/small.py", "mine/small.py")
    assert own.build(DieRunner()).links == 0


def test_the_null_build_looks_at_the_file(own: Space) -> None:
    assert own.command("build", runner=own.build().runner).code == 0
    assert own.command("build").code == 0, "nothing is asked of a runner"
    own.write({"own/_words.py": 'WORD = "other"\n'})
    assert '"state": "miss"' in own.command("plan", "--json").out


WRONG = {
    "raises": ("def specialize(mod, arch):\n    return 1 / 0\n", "own/small.py:2: specialize() fails: ZeroDivisionError: division by zero"),
    "import": (
        "import absent_module\n\n\ndef specialize(mod, arch):\n    return ()\n",
        "own/small.py:1: small.py fails to import: ModuleNotFoundError: No module named 'absent_module'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_fails_fails_its_entry_with_the_place(own: Space, what: str) -> None:
    text, sentence = WRONG[what]
    own.write({"own/small.py": text})
    built = own.build()
    assert built.build.failures == {"small@box": sentence}
    assert {e.workload.name for e in built.build.plan.entries if e.tuned} == {"large", "tabled"}


DECLARED = {
    "absent": ("own/smal.py", 'specialize is "own/smal.py"; no such file in the workspace; did you mean "own/small.py"?'),
    "outside": ("../small.py", 'specialize is "../small.py", which is outside the workspace'),
    "no Python": ("table.txt", 'specialize is "table.txt"; expected the path of a .py file, relative to the workspace'),
    "no function": ("own/_words.py", "there is no function specialize(mod, arch); define it at the file's top level"),
    "syntax": ("own/half.py", "half.py is not Python: "),
}
PLACES = {"no function": "own/_words.py", "syntax": "own/half.py:2"}


@pytest.mark.parametrize("what", DECLARED)
def test_a_wrong_path_or_file_is_a_mistake_of_the_declaration(own: Space, what: str) -> None:
    path, sentence = DECLARED[what]
    own.write({"own/half.py": "def specialize(mod, arch):\n    return (\n"})
    own.edit("workloads.toml", "own/small.py", path)
    with pytest.raises(DeclarationError, match=re.escape(sentence)) as caught:
        declare(Path(own.root))
    (problem,) = caught.value.problems
    line = own.read("workloads.toml").splitlines().index(f'specialize = "{path}"') + 1
    assert str(problem).startswith(f"{PLACES.get(what, f'workloads.toml:{line}')}: small: {sentence}")
