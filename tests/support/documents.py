"""Owns code blocks of documents: finding them with what is noted above them, and running a page's blocks in order.

Knows nothing of what pages teach. A comment above a block says what becomes of it:

    <!-- file: PATH -->            it is a file of the page's folder (`example: PATH` means the same, and Python files are run)
    <!-- declare -->               it becomes workloads.toml, with edition, artifact and target where it has none
    <!-- append: PATH -->          it is added to a file
    <!-- edit: PATH -->            each of its lines takes the place of the line with the same key
    <!-- shortened: A -> B -->     it is run with B in the place of A
    <!-- not run: REASON -->       it is only shown
    <!-- run by: TEST -->          anywhere in a page: that test runs the blocks that are examples or commands
    <!-- workspace: README.md -->  anywhere in a page: its folder begins as the README's workspace, built

Without one, sh and Python are run, TOML is checked as a part of workloads.toml, and text behind a command is compared with what
that has printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_PAGE = re.compile(r"^<!-- (workspace|run by): (.*?) -->$", re.MULTILINE)
SHELL, PYTHON, OUTPUT = {"sh", "bash"}, {"python", "py"}, {"", "text"}
HEAD = {
    "edition": "edition = 1\n",
    "artifact": '[artifact]\nname = "page"\nversion = "0.1.0"\n',
    "target": '[target.host]\narch = "host"\n',
    "workload": '[[workload]]\nname = "projection"\nrule = "matmul"\nm = 32\nn = 64\nk = 64\n',
}


@dataclass(frozen=True)
class Block:
    """A block of code, and what is noted above it: `verb` and `noted`."""

    line: int
    language: str
    code: str
    verb: str
    noted: str


def blocks(text: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(text):
        verb, _, noted = (found[1] or "").partition(": ")
        indent = len(found[2])
        code = "".join(line[indent:] if line.strip() else line for line in found[4].splitlines(keepends=True))
        yield Block(text.count("\n", 0, found.start(3)) + 1, found[3], code, verb.removeprefix("torch "), noted)


def page_notes(text: str) -> dict[str, str]:
    """Return what is noted of the whole page."""
    return dict(_PAGE.findall(text))


def complete(fragment: str) -> str:
    """Return a part of workloads.toml as a whole one: keys before its first table are an entry's."""
    given = tomllib.loads(fragment)
    if "edition" in given:
        return fragment
    first = re.search(r"^\[", fragment, re.MULTILINE)
    keys, tables = (fragment[: first.start()], fragment[first.start() :]) if first else (fragment, "")
    parts = [text for name, text in HEAD.items() if name not in given]
    return "".join([*parts, keys, tables]) if "workload" not in given else "".join([*parts, tables])


class Folder:
    """A folder in which a page's blocks are run, one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.printed = ""

    def run(self, block: Block) -> None:
        """Do what becomes of a block; raise AssertionError, with its line, where that fails."""
        if block.verb == "not run":
            assert block.noted, f"line {block.line}: say why it is not run"
        elif block.verb in {"file", "example", "append", "edit", "declare"}:
            self._written(block)
        elif block.language in SHELL:
            self._command(block, ["bash", "-euo", "pipefail", "-c", self._code(block)])
        elif block.language in PYTHON:
            self._command(block, [sys.executable, "-c", self._code(block)])
        elif block.language == "toml":
            self._checked(block)
        elif block.language in OUTPUT:
            self._compared(block)
        else:
            raise AssertionError(f"line {block.line}: {block.language} is not run; say why: <!-- not run: … -->")

    def _code(self, block: Block) -> str:
        if block.verb != "shortened":
            return block.code
        before, _, after = block.noted.partition(" -> ")
        assert before in block.code, f"line {block.line}: there is no {before}"
        return block.code.replace(before, after)

    def _written(self, block: Block) -> None:
        path = self.root / (block.noted or "workloads.toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if block.verb == "append":
            text = f"{before}\n{block.code}"
        elif block.verb == "edit":
            text = before
            for line in block.code.splitlines():
                text, count = re.subn(
                    rf"^{re.escape(line.split('=')[0])}=.*$", lambda _, line=line: line, text, count=1, flags=re.MULTILINE
                )
                assert count, f"line {block.line}: {path.name} has no such line"
        else:
            text = complete(block.code) if block.verb == "declare" else block.code
        path.write_text(text, encoding="utf-8")
        if block.verb == "example" and block.language in PYTHON:
            self._command(block, [sys.executable, block.noted])

    def _checked(self, block: Block) -> None:
        folder = self.root / f"line{block.line}"
        folder.mkdir()
        (folder / "workloads.toml").write_text(complete(block.code), encoding="utf-8")
        self._command(block, [sys.executable, "-m", "kerneldecl", "-C", str(folder), "check"])

    def _command(self, block: Block, command: list[str]) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "COLUMNS": "100", "GITHUB_STEP_SUMMARY": str(self.root / "summary.md")}
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, f"line {block.line}: {block.code}\n{done.stdout}\n{done.stderr}"
        self.printed = done.stdout

    def _compared(self, block: Block) -> None:
        """Every line stands in what was printed, but for numbers and what `…` stands for."""
        if not self.printed:
            return
        printed = [_plain(line) for line in self.printed.splitlines()]
        for line in filter(None, map(_plain, block.code.splitlines())):
            pattern = ".*".join(map(re.escape, line.split("…")))
            assert any(re.fullmatch(pattern, each) for each in printed), f"line {block.line}: nothing like {line!r} in\n{self.printed}"


def _plain(line: str) -> str:
    """Return a line with numbers and runs of spaces made alike."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(?:\.\d+)?", "0", line)).strip()
