"""What is public is documented: names, fields of records, and every page that is made of the code has all that the code has."""

from __future__ import annotations

import re
import sys

import pytest
from support.repository import REPOSITORY

sys.path.append(str(REPOSITORY / "docs/site"))

from reference import MODULES, public_names, reference

from kerneldecl.cli.commands import main
from kerneldecl.errors import ExitCode
from kerneldecl.store.result_types import FIELDS


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_documented_where_they_are_defined(module: str) -> None:
    found = list(public_names(REPOSITORY, module))
    assert found
    assert [each.name for each in found if not each.text] == []


def test_every_command_and_exit_code_has_its_place() -> None:
    pages = reference(REPOSITORY)
    headings = set(re.findall(r"^## kerneldecl (\S+)", pages["reference/commands.md"], re.MULTILINE))
    assert headings == set(main.commands)
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", pages["reference/exit-codes.md"], re.MULTILINE)} == set(map(int, ExitCode))


def test_every_rule_has_its_attributes_and_an_example() -> None:
    page = reference(REPOSITORY)["reference/rules.md"]
    sections = {section.split("\n", 1)[0]: section for section in page.split("\n## ")[1:]}
    assert set(sections) == {path.stem for path in (REPOSITORY / "rules").glob("[!_]*.py")}
    for section in sections.values():
        assert "| attribute | default | takes | is |" in section
        assert "```toml\n[[workload]]" in section


def test_every_table_of_a_workloads_file_is_there() -> None:
    page = reference(REPOSITORY)["reference/workloads.md"]
    for table in ("artifact", "target.NAME", "defaults", "limits", "cache", "trust", "import.NAME", "budget", "toolchain"):
        assert f"## [{table}]" in page
    assert "`top_k`" in page


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_a_record_is_described(kind: str) -> None:
    page = (REPOSITORY / "docs/reference/records.md").read_text(encoding="utf-8")
    assert [field for field in FIELDS[kind] if f"`{field}`" not in page] == []


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    """Each part of a message between `…` stands in a string of the sources, but for what these put in."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "kerneldecl").rglob("*.py"))
    page = (REPOSITORY / "docs/troubleshooting.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]*)`", cell)]
    parts = [part.strip(' "') for message in messages for part in message.split("…")]
    assert len(messages) > 15
    assert [part for part in parts if len(part) > 3 and part not in sources] == []
