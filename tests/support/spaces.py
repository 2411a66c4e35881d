"""Owns temporary workspaces: writing their files, running the real command in them, building them with fakes.

Knows nothing of what a test expects.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import kerneldecl.__main__
from kerneldecl import api, flow
from kerneldecl.declare.select import select
from kerneldecl.planning.plan import Plan
from kerneldecl.planning.workspace import Workspace, open_workspace
from kerneldecl.stages.session import Options, Session, make_plan
from kerneldecl.store.keys import digest
from kerneldecl.tuning.events import Event
from kerneldecl.tuning.task import Runner
from support.fakes import ARCH, POLICY, RULE, TEMPLATE, DieRunner, FakeLinker, FakeRunner
from support.in_this_process import run_command
from support.repository import REPOSITORY

DECLARED = ("rules", "policies", "templates", "archs")
HEAD = """\
edition = 1

[artifact]
name = "fakes"
version = "1.0"

[target.box]
arch = "test-cpu"

[defaults]
policy = "plain"
top_k = 3
"""
ENTRIES = """
[[workload]]
name = "small"
rule = "scale"
n = 8

[[workload]]
name = "large"
rule = "scale"
n = 64
factor = 3.0

[[workload]]
name = "tabled"
rule = "lookup"
n = 8
table = "table.txt"
"""
FAKES = {
    "workloads.toml": HEAD + ENTRIES,
    "table.txt": "1 2 3\n",
    "rules/scale.py": RULE.format(name="Scale"),
    "rules/lookup.py": RULE.format(name="Lookup"),
    "policies/plain.py": POLICY,
    "templates/unrolled.py": TEMPLATE,
    "archs/test-cpu.toml": ARCH,
}

REAL = {
    "workloads.toml": """\
edition = 1

[artifact]
name = "mini"
version = "0.1.0"

[target.host]
arch = "host"

[defaults]
policy = "plain"
top_k = 2

[[workload]]
name = "add"
rule = "elementwise"
op = "add"
shape = [[24, 32], [7, 9]]

[[workload]]
name = "relu"
rule = "elementwise"
op = "relu"
shape = [24, 32]
tags = ["activation"]

[[workload]]
name = "gemm"
rule = "matmul"
m = 16
n = 24
k = 32
""",
    "policies/plain.py": """\
from kerneldecl.model import Candidate, Proposal

TEMPLATES = ("plain",)
CHOICES = (0, 1)


def propose(space, arch, top_k):
    return tuple(Proposal(Candidate.of("plain", {"parallel": p}), 1e-6) for p in CHOICES[:top_k])
""",
    "templates/plain.py": """\
import tvm


def apply(mod, params, arch):
    sch = tvm.s_tir.Schedule(mod)
    if params["parallel"]:
        block = sch.get_child_blocks(sch.get_sblock("root"))[-1]
        sch.parallel(sch.get_loops(block)[0])
    return sch
""",
}
"""A workspace of four small entries for real builds, of a few seconds each."""


@dataclass
class Built:
    """A build with fakes: what it returned, what its collaborators were asked, what it reported."""

    build: Session
    runner: FakeRunner | DieRunner
    links: int
    events: list[Event] = field(default_factory=list)

    @property
    def counts(self) -> Mapping[str, int]:
        assert isinstance(self.runner, FakeRunner)
        return self.runner.counts

    @property
    def ran(self) -> set[tuple[str, str]]:
        """Kind and entry of each action that ran."""
        return {(action.kind, action.entry) for action in self.build.ran}


@dataclass(frozen=True)
class Command:
    """What came of a command that ran in this process."""

    code: int
    out: str
    err: str
    links: int


@dataclass(frozen=True)
class Space:
    """A workspace in a folder of its own."""

    root: Path

    def write(self, files: Mapping[str, str]) -> Space:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return self

    def read(self, name: str) -> str:
        return (self.root / name).read_text(encoding="utf-8")

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text that must occur once."""
        text = self.read(name)
        assert text.count(old) == 1, f"{name} holds {old!r} {text.count(old)} times"
        self.write({name: text.replace(old, new)})

    def json(self, name: str) -> Any:
        return json.loads(self.read(name))

    def records(self, kind: str) -> list[Path]:
        return sorted(self.root.glob(f"cache/*/{kind}/*.json"))

    def copy_of(self, root: Path, *folders: str) -> Space:
        """Return another workspace with the same declarations and, of the rest, these files and folders alone."""
        root.mkdir(parents=True)
        for path in self.root.iterdir():
            if path.is_file() and (path.name != "workloads.lock" or path.name in folders):
                shutil.copy(path, root)
        for folder in (*DECLARED, *folders):
            if (self.root / folder).is_dir():
                shutil.copytree(self.root / folder, root / folder)
        return Space(root)

    def artifact(self, target: str = "host") -> Path:
        """Return the folder of the one artifact of a target."""
        (folder,) = self.root.glob(f"dist/*/{target}")
        return folder

    def artifact_files(self) -> dict[str, str]:
        """Return the digest of every file of every artifact, by path."""
        files = (path for path in sorted((self.root / "dist").rglob("*")) if path.is_file())
        return {str(path.relative_to(self.root)): digest(path.read_bytes()) for path in files}

    # The real command

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start `kerneldecl` here, in a session of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "kerneldecl", *arguments],
            cwd=self.root,
            env={**clean_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `kerneldecl` here to its end, which must be with this exit code."""
        with self.start(*arguments, **environment) as process:
            out, err = process.communicate(timeout=180)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(arguments, code, out, err)

    def run_json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", code=code).stdout)

    def run_here(self, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `kerneldecl` as `run` does, but in this process, and so its workers: nothing imports TVM again."""
        ended, out, err = run_command(self.root, arguments, {**clean_environment(), **environment})
        assert ended == code, f"exit code {ended}\n{out}\n{err}"
        return subprocess.CompletedProcess(arguments, code, out, err)

    def run_json_here(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.run_here(*arguments, "--json", code=code).stdout)

    # In process, with fakes

    def command(self, *arguments: str, runner: FakeRunner | DieRunner | None = None) -> Command:
        """Run `kerneldecl` in this process, on fakes; without a runner, one that must not be asked anything."""
        linker, out, err = FakeLinker(), io.StringIO(), io.StringIO()

        @contextlib.contextmanager
        def runners() -> Iterator[Runner]:
            yield runner or DieRunner()

        interrupt = signal.getsignal(signal.SIGINT)
        on_fakes = functools.partial(api.run_build, runners=runners, linkers=dict.fromkeys(("cpu", "cuda"), linker))
        with (
            mock.patch("kerneldecl.api.run_build", on_fakes),
            mock.patch("sys.argv", ["kerneldecl", "-C", str(self.root), *arguments]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = kerneldecl.__main__.main()
        signal.signal(signal.SIGINT, interrupt)
        return Command(code, out.getvalue(), err.getvalue(), linker.calls)

    def open(self) -> Workspace:
        return open_workspace(self.root)

    def plan(self) -> Plan:
        return make_plan(self.open())

    def build(self, runner: FakeRunner | DieRunner | None = None, patterns: Sequence[str] = (), **options: bool) -> Built:
        """Build with fakes; entries that fail are left to the caller to look at."""
        workspace, linker = self.open(), FakeLinker()
        chosen = frozenset(w.entry for w in select(workspace.declaration.workloads, patterns)) if patterns else None
        built = Built(None, runner or FakeRunner(), 0)  # type: ignore[arg-type]  # filled in below

        @contextlib.contextmanager
        def runners() -> Iterator[Runner]:
            yield built.runner

        linkers = dict.fromkeys(("cpu", "cuda"), linker)
        built.build = flow.build(workspace, Options(selected=chosen, **options), runners, linkers, built.events.append)
        built.links = linker.calls
        return built


def clean_environment() -> dict[str, str]:
    """Return the environment without what would change how the command behaves; what this process imports, others can, too."""
    dropped = {"CI", "NO_COLOR", "FORCE_COLOR", "TVM_NUM_THREADS", "TVM_BIND_THREADS"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH", ""))))
    return {**kept, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
