"""Owns the tests of shell completion: what the shell asks, and what it is answered, by the real program.

Knows nothing of shells' own code.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.spaces import FAKES, Space, clean_environment

from kerneldecl.cli.commands import main
from kerneldecl.cli.completion import words


def asked(space: Space, *typed: str) -> list[str]:
    """Return what bash would offer behind the typed words, the last of which is incomplete."""
    question = {"_KERNELDECL_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["kerneldecl", *typed]), "COMP_CWORD": str(len(typed))}
    program = "import sys; sys.argv = ['kerneldecl']; from kerneldecl.__main__ import main; main()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=space.root, env=clean_environment() | question, capture_output=True, text=True, check=False)
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path).write(FAKES)


def test_commands_options_and_entries_are_completed(space: Space) -> None:
    assert asked(space, "templ") == ["templates"]
    assert "--retune" in asked(space, "build", "--re")
    assert asked(space, "show", "sma") == ["small", "small@box"]
    assert asked(space, "build", "rule:") == ["rule:scale", "rule:lookup"]
    assert asked(space, "rules", "loo") == ["lookup"]
    assert asked(space, "policies", "wgmma_att") == ["wgmma_attention", "wgmma_attention_decode"]
    assert sorted(asked(space, "build", "-D", "to")) == ["tolerance=", "top_k="]
    assert asked(space, "build", "-D", "policy=pla") == ["policy=plain"]


def test_a_file_with_mistakes_or_none_completes_what_it_can(space: Space, tmp_path: Path) -> None:
    space.edit("workloads.toml", 'rule = "lookup"', "rule = 3")
    assert "small" in words(space.root)
    (space.root / "workloads.toml").write_text("[[workload]\nname =")
    assert words(space.root) == []
    assert words(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("sho", "show "), ("query rule:sc", "query rule:scale "), ("show small@b", "show small@box "), ("query sta", "query stale:")],
)
def test_bash_completes_words_that_hold_colons_and_ats(space: Space, typed: str, completed: str) -> None:
    """What readline puts in place of its own last word, which it begins behind the last of these marks."""
    line = f"kerneldecl {typed}"
    cut = re.split(r"[ :@]", line)[-1]
    script = (
        f"{space.command('completion', 'bash').out}\n"
        "compopt() { spaced=''; }\n"
        f"kerneldecl() {{ {sys.executable} -c \"import sys; sys.argv = ['kerneldecl']; from kerneldecl.__main__ import main; main()\"; }}\n"
        f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=('{cut}') COMP_CWORD=0 spaced=' '\n"
        "_kerneldecl_completion kerneldecl\n"
        'echo "${COMPREPLY[0]}$spaced"\n'
    )
    done = subprocess.run(["bash", "-c", script], cwd=space.root, env=clean_environment(), capture_output=True, text=True, check=True)
    assert line.removesuffix(cut) + done.stdout.rstrip("\n") == f"kerneldecl {completed}", done.stderr


_TYPED = [
    ("sho", ["show"]),
    ("show sma", ["small", "small@box"]),
    ("query rule:", ["rule:lookup", "rule:scale"]),
    ("rules loo", ["lookup"]),
]


def _program(folder: Path) -> dict[str, str]:
    """Return the environment of a shell whose path has `kerneldecl`, which is this one."""
    program = folder / "kerneldecl"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'kerneldecl'\nfrom kerneldecl.__main__ import main\nmain()\n")
    program.chmod(0o755)
    environment = clean_environment()
    return environment | {"PATH": f"{folder}:{environment['PATH']}", "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
@pytest.mark.parametrize(("typed", "offered"), _TYPED)
def test_fish_offers_what_a_word_may_become(space: Space, tmp_path: Path, typed: str, offered: list[str]) -> None:
    script = f"kerneldecl completion fish | source; complete -C 'kerneldecl {typed}'"
    done = subprocess.run(
        ["fish", "-c", script], cwd=space.root, env=_program(tmp_path), capture_output=True, text=True, check=True, timeout=60
    )
    assert sorted(line.partition("\t")[0] for line in done.stdout.splitlines()) == offered, done.stderr


_ZSH = """\
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1=; autoload -Uz compinit; compinit -u; eval "$(kerneldecl completion zsh)"'
zpty -w shell 'compadd() { builtin compadd -O offered "$@"; print -rl -- "offered ${^offered[@]}" > offered; builtin compadd "$@" }'
zpty -w shell 'print rea''dy'
zpty -r shell line '*ready*'
zpty -n -w shell "kerneldecl $TYPED"$'\\t'
for turn in {1..300}; do [[ -s offered ]] && break; sleep 0.1; done
sleep 0.2
cat offered
"""


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
@pytest.mark.parametrize(("typed", "offered"), _TYPED)
def test_zsh_offers_what_a_word_may_become(space: Space, tmp_path: Path, typed: str, offered: list[str]) -> None:
    environment = _program(tmp_path) | {"TYPED": typed}
    done = subprocess.run(
        ["zsh", "-f", "-c", _ZSH], cwd=space.root, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert sorted(line.removeprefix("offered ") for line in done.stdout.splitlines()) == offered, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script_that_asks_this_program(space: Space, shell: str) -> None:
    script = space.command("completion", shell).out
    assert f"_KERNELDECL_COMPLETE={shell}_complete" in script


def test_the_manual_page_has_every_command_and_option(space: Space) -> None:
    done = space.command("man")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith(".TH KERNELDECL 1")
    for name in main.list_commands(click.Context(main)):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert any(line.startswith(f".SS kerneldecl {name}") for line in lines)
        for option in (each for each in command.params if isinstance(each, click.Option)):
            written = option.opts[-1].replace("-", "\\-")
            assert any(line.startswith("\\fB") and written in line for line in lines), option.opts
    assert not [line for line in lines if line.startswith((".", "'")) and not line.startswith((".TH ", ".SH ", ".SS ", ".PP", ".TP"))]
