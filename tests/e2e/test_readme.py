"""The README's example is built and called as it stands there, and docs/reference/cli.md lists every command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import REPOSITORY

ROOT = REPOSITORY
README = (ROOT / "README.md").read_text(encoding="utf-8")


CALLING = (ROOT / "docs/guides/calling.md").read_text(encoding="utf-8")


def example(name: str, document: str = README) -> str:
    found = re.search(rf"<!-- (?:torch )?example: {re.escape(name)} -->\n```\w+\n(.*?)```", document, re.DOTALL)
    assert found is not None, f"there is no example {name}"
    return found[1]


def run(*command: str, cwd: Path) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_example_goes_from_a_declaration_to_a_called_kernel(tmp_path: Path) -> None:
    for name in ("workloads.toml", "use.py"):
        (tmp_path / name).write_text(example(name), encoding="utf-8")
    run(sys.executable, "-m", "kerneldecl", "build", cwd=tmp_path)
    run(sys.executable, "use.py", cwd=tmp_path)
    assert "2 up to date" in run(sys.executable, "-m", "kerneldecl", "build", cwd=tmp_path)
    shown = run(sys.executable, "-m", "kerneldecl", "show", "projection[m=128]", cwd=tmp_path)
    assert "predicted" in shown
    assert "8 verified" in shown


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the README's workspace was built."""
    folder = tmp_path_factory.mktemp("calling")
    (folder / "workloads.toml").write_text(example("workloads.toml").replace("top_k = 8", "top_k = 1"), encoding="utf-8")
    run(sys.executable, "-m", "kerneldecl", "build", cwd=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calling.py", "dispatching.py", "operators.py"])
def test_documented_calls_run(built: Path, name: str) -> None:
    code = example(name, CALLING)
    if "import torch" in code:
        pytest.importorskip("torch", reason="needs torch")
    (built / name).write_text(code, encoding="utf-8")
    said = run(sys.executable, name, cwd=built)
    if name == "calling.py":
        promised = re.search(r"^print\(projection\)\n# (.*)$", code, re.MULTILINE)
        assert promised is not None
        assert said.splitlines()[0] == promised[1]


def test_every_command_stands_in_its_document() -> None:
    import click

    from kerneldecl.cli.commands import main

    commands = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    listed = {line.split("`")[1].split()[1] for line in commands.splitlines() if line.startswith("| `kerneldecl ")}
    assert listed == set(main.list_commands(click.Context(main)))
    assert all(main.get_command(click.Context(main), name) for name in listed), "each is found in its module"


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "rules").glob("[!_]*.py")))
def test_every_standard_rule_stands_in_the_readme(name: str) -> None:
    assert f"`{name}`" in README
