"""Owns the tests of what the commands rules, policies, templates, archs and new tell and write.

Knows nothing of what the plug-ins compute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
from support.repository import REPOSITORY
from support.spaces import Space, clean_environment

from kerneldecl.declare.catalogue import rule_page, rule_pages
from kerneldecl.declare.document import declare
from kerneldecl.declare.operator_names import operator_names
from kerneldecl.declare.rule_markdown import COMMAND, index_text, own_sections
from kerneldecl.plugins.find import STANDARD, plugin_names
from kerneldecl.plugins.policy_order import kinds_of, policies_behind, standard_order


@pytest.mark.parametrize("name", plugin_names("rules", STANDARD))
def test_every_standard_rule_has_an_entry_to_paste_that_has_no_mistake(tmp_path: Path, name: str) -> None:
    page = rule_page(STANDARD, name)
    assert "…" not in page.example
    head = 'edition = 1\n[artifact]\nname = "a"\nversion = "1"\n[target.host]\narch = "host"\n'
    (tmp_path / "workloads.toml").write_text(head + page.example)
    if name == "tensor_ir":
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels/mine.py").write_text("")
    (workload,) = declare(tmp_path).workloads
    assert workload.rule == name
    assert (page.signature is None) == (name == "tensor_ir")
    assert all(attribute.summary for attribute in page.attributes), "every attribute says what it is"


def test_the_catalogue_needs_no_workspace(tmp_path: Path) -> None:
    space = Space(tmp_path)
    listed = {command: space.command(command).out for command in ("rules", "policies", "templates", "archs")}
    assert "matmul" in listed["rules"]
    assert "evolution" in listed["policies"]
    assert "gpu_reduce" in listed["templates"]
    assert "NVIDIA H200" in listed["archs"]
    shown = space.command("rules", "matmul").out
    assert 'rule = "matmul"' in shown
    assert "my_matmul(A: float16[512, 4096], B: float16[4096, 4096], bias: float16[4096]) -> C: float16[512, 4096]" in shown
    assert "chunks   chunks into which the reduction is split" in space.command("templates", "gpu_reduce").out
    assert "Probability that a child's parameter comes from anywhere" in space.command("policies", "evolution").out
    assert "Knows nothing" not in space.command("policies", "evolution").out
    assert json.loads(space.command("archs", "h200", "--json").out)["found"][0]["model"] == "NVIDIA H200"


def test_an_unknown_name_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    done = Space(tmp_path).command("rules", "matmull")
    assert done.code == 2
    count = len(plugin_names("rules", STANDARD))
    assert f'unknown rule "matmull"; expected one of the {count} that `kerneldecl rules` lists; did you mean "matmul"?' in done.err
    assert 'did you mean "matmul"?' in done.err


def test_operators_are_found_by_the_names_that_other_libraries_have(tmp_path: Path) -> None:
    space = Space(tmp_path)
    shown = space.command("rules", "argmax").out
    assert shown.startswith('argmax: rule arg_reduce with op = "argmax"')
    assert 'rule = "arg_reduce"' in shown
    (tmp_path / "workloads.toml").write_text(
        'edition = 1\n[artifact]\nname = "a"\nversion = "1"\n[target.host]\narch = "host"\n[[workload]]\nname = "x"\nrule = "interpolate"\n'
    )
    assert "rule resize2d computes it, with op and coordinates" in space.command("check").err
    standard = plugin_names("rules", STANDARD)
    assert {rule for rule, _ in operator_names().values()} <= set(standard)
    assert not operator_names().keys() & set(standard), "a rule is found by its own name"


WRITE_PAGES = f"`{COMMAND}` writes the pages as they should be"


@pytest.mark.parametrize("name", plugin_names("rules", STANDARD))
def test_the_page_of_every_rule_says_what_the_rule_says(name: str) -> None:
    file = REPOSITORY / f"docs/catalogue/{name}.md"
    assert file.is_file(), WRITE_PAGES
    assert file.read_text().startswith(own_sections(rule_page(STANDARD, name))), WRITE_PAGES


def test_there_is_a_page_a_rule_and_an_index() -> None:
    pages = rule_pages(STANDARD)
    assert {file.name for file in (REPOSITORY / "docs/catalogue").iterdir()} == {"README.md", *(f"{page.name}.md" for page in pages)}
    assert (REPOSITORY / "docs/catalogue/README.md").read_text() == index_text(pages), WRITE_PAGES


def test_a_workspaces_own_rule_shows_what_must_be_given(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.command("new", "rule", "saxpy")
    shown = space.command("rules", "saxpy").out
    assert "in rules/saxpy.py" in shown
    assert "shape = …" in shown
    assert tomli.loads((REPOSITORY / "kerneldecl/declare/rule_examples.toml").read_text()).keys() == set(plugin_names("rules", STANDARD))


def test_names_that_cannot_be_are_refused_and_nothing_is_written_over(tmp_path: Path) -> None:
    space = Space(tmp_path)
    assert space.command("new", "rule", "saxpy").code == 0
    (tmp_path / "rules/saxpy.py").write_text("mine")
    assert "there is a rule saxpy already" in space.command("new", "rule", "saxpy").err
    assert "'Big' cannot be a rule's name; write small letters" in space.command("new", "rule", "Big").err
    (tmp_path / "tests/test_other.py").write_text("mine")
    assert "tests/test_other.py: there is one already" in space.command("new", "policy", "other").err
    assert not (tmp_path / "policies").exists()
    assert (tmp_path / "rules/saxpy.py").read_text() == "mine"


@pytest.mark.slow
def test_what_new_writes_passes_its_own_tests(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.command("new", "rule", "saxpy")
    space.command("new", "policy", "big_tiles")
    command = [sys.executable, "-m", "pytest", "-q", "tests", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_comment_behind_what_a_policy_says_of_itself_is_a_comment(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/mine.py").write_text('TEMPLATES = ()\nAUTO = {"cpu": 1}  # ahead of all\n')
    (tmp_path / "policies/other.py").write_text('TEMPLATES = ()\nKINDS = ("cuda",)  # for GPUs\n')
    assert policies_behind(tmp_path, "auto", "cpu") == ("mine", *standard_order("cpu"))
    assert kinds_of(tmp_path, "other") == ("cuda",)


def test_init_writes_a_workspace_for_chosen_targets_with_its_schema(tmp_path: Path) -> None:
    space = Space(tmp_path)
    assert 'did you mean "h200"?' in space.command("init", "--target", "h20").err
    assert not (tmp_path / "workloads.toml").exists()
    space.command("init", "--target", "h200", "--target", "host")
    assert {workload.entry for workload in declare(tmp_path).workloads} == {
        f"projection[m={m}]@{target}" for m in (16, 512) for target in ("h200", "host")
    }
    schema = tmp_path / (tmp_path / "workloads.toml").read_text().splitlines()[0].removeprefix("#:schema ")
    before = json.loads(schema.read_text())
    assert before["$defs"].keys() == set(plugin_names("rules", STANDARD))
    space.command("new", "rule", "saxpy")
    space.command("schema", "--write")
    assert json.loads(schema.read_text())["$defs"].keys() == {*before["$defs"], "saxpy"}


def test_init_leaves_nothing_where_the_model_is_not_there(tmp_path: Path) -> None:
    assert "nothere.pt2: no such file" in Space(tmp_path).command("init", "--from", "nothere.pt2").err
    assert not list(tmp_path.glob("workloads*"))
