"""Owns workspaces of many entries that are up to date, built by the real flow with workers and a linker that answer at once.

Knows nothing of what is timed in them. Tuning ten thousand kernels would take days.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kerneldecl.api import run_build
from kerneldecl.model import Access, Axis, Block, IterSpace, frozen
from kerneldecl.planning.workspace import open_workspace
from kerneldecl.plugins.load import load_rule
from kerneldecl.runners.process import Answer
from kerneldecl.serial import to_json
from kerneldecl.stages.session import Options
from kerneldecl.store.keys import digest
from kerneldecl.tuning.propose import propose

Shape = tuple[int, int]
Layout = Callable[[Sequence[Shape]], str]
HEAD = """\
edition = 1

[artifact]
name = "many"
version = "0.1.0"

[target.host]
arch = "host"

[defaults]
targets = ["host"]
top_k = 1
"""
LISTED = """\
kind = "cpu"
model = ""

[tvm_target]
kind = "llvm"
mcpu = "x86-64-v2"
num-cores = 2

[cpu]
cores = 2
vector_bytes = 16
vector_registers = 16
fma_per_cycle = 2.0
l1d_bytes = 32768
l2_bytes = 262144
l3_bytes = 0
line_bytes = 64
clock_hz = 2.0e9
l1_bytes_per_cycle = 32.0
l2_bytes_per_cycle = 32.0
l3_bytes_per_cycle = 16.0
dram_bytes_per_s = 1.0e10
parallel_secs = 5.0e-6
"""
"""An arch that is declared, not detected: its records are in `cache/record`, to be committed."""
# `auto` asks it before the standard policies, whose digests belong to the keys as well.
POLICY = """\
from kerneldecl.model import Candidate, Proposal

TEMPLATES = ()
AUTO = {"cpu": 1}


def propose(space, arch, top_k):
    return (Proposal(Candidate.of("cpu_elementwise", {"vectors": 4}), 1e-6),)
"""


def tables(shapes: Sequence[Shape]) -> str:
    """Return a file with a table for each entry."""
    return HEAD + "".join(
        f'\n[[workload]]\nname = "relu_{index}"\nrule = "elementwise"\nop = "relu"\nshape = [{m}, {n}]\n'
        for index, (m, n) in enumerate(shapes)
    )


def one_table(shapes: Sequence[Shape]) -> str:
    """Return a file with one table whose list of shapes expands to the entries."""
    listed = "".join(f"    [{m}, {n}],\n" for m, n in shapes)
    return f'{HEAD}\n[[workload]]\nname = "relu"\nrule = "elementwise"\nop = "relu"\nshape = [\n{listed}]\n'


LAYOUTS: Mapping[str, Layout] = {"a table each": tables, "one table": one_table}


def declared(text: str) -> str:
    """Return a file's text for the arch that is declared instead of the detected one."""
    return text.replace('arch = "host"', 'arch = "listed"')


def shapes_of(count: int) -> list[Shape]:
    return [(64, n) for n in range(1, count + 1)]


class InstantRunner:
    """Answers requests at once, in the form of a worker's answers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, count: int) -> None:
        pass

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float, priority: int = 0) -> Iterator[tuple[int, Answer]]:
        del limit_secs, priority
        actions = {"lower": _lowered, "build": self.built, "describe": _described}
        for index, request in enumerate(requests):
            yield index, actions[request["action"]](request)

    def object_of(self, request: Mapping[str, Any]) -> bytes:
        """Return the object file of a request to build."""
        return repr(sorted(request["spec"]["attrs"].items())).encode().ljust(2000, b"\0")

    def built(self, request: Mapping[str, Any]) -> Answer:
        content = self.object_of(request)
        code = digest(content)
        (Path(request["folder"]) / f"{code}.o").write_bytes(content)
        return {"schedule_digest": digest(b"scheduled" + content), "code_digest": code, "code_bytes": len(content)}

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        del limit_secs
        if request["action"] == "propose":
            return propose(**{name: value for name, value in request.items() if name not in {"action", "device", "model"}})
        verdict: Answer = {"error": 1e-7, "secs": 1e-6}
        answers: dict[str, Answer] = {"verify": verdict, "confirm": verdict, "sample": {"samples": [1e-6]}}
        return answers.get(request["action"], {})

    def side_by_side(self, model: str, most: int) -> Sequence[Any]:
        del model, most
        return (self,)


def _lowered(request: Mapping[str, Any]) -> Answer:
    attrs = {name: frozen(value) for name, value in request["attrs"].items()}
    rule = load_rule(Path(request["root"]), request["rule"])(**attrs)
    signature = rule.signature()
    (output,) = signature.outputs
    axes = tuple(Axis(f"i{i}", extent, "spatial") for i, extent in enumerate(output.shape))
    index = tuple(((dim, 1),) for dim in range(len(axes)))
    reads, writes = (tuple(Access(arg.name, arg.shape, arg.dtype, index) for arg in args) for args in (signature.inputs, signature.outputs))
    space = IterSpace(
        (Block(output.name, axes, reads, writes, flops_per_point=1),), tuple(a.name for a in signature.inputs), (output.name,)
    )
    return {
        "computation": digest(repr((request["rule"], sorted(attrs.items()))).encode()),
        "signature": to_json(signature),
        "flops": rule.flops(),
        "least_bytes": rule.least_bytes(),
        "tolerance": rule.tolerance(),
        "space": to_json(space),
    }


def _described(request: Mapping[str, Any]) -> Answer:
    attrs = repr(sorted(request["spec"]["attrs"].items()))
    return {
        "database": f'{{"workloads": ["{digest(attrs.encode())}"], "trace": [[], []], "target": {{}}, "args": []}}',
        "source": f"# {attrs}\n",
    }


def _linked(library: Path, objects: Sequence[Path]) -> None:
    library.write_bytes(b"".join(path.read_bytes() for path in objects))


def make_workspace(root: Path, text: str, like: Path | None, runner: Callable[[], InstantRunner] = InstantRunner) -> None:
    """Build a workspace in which everything is up to date, with the records of `like`, which declares the same workloads.

    What it builds need not survive a power cut: nothing is flushed to the disk.
    """
    (root / "policies").mkdir(parents=True, exist_ok=True)
    (root / "workloads.toml").write_text(text, encoding="utf-8")
    write_if_other(root / "policies" / "first.py", POLICY)
    if 'arch = "listed"' in text:
        (root / "archs").mkdir(exist_ok=True)
        write_if_other(root / "archs" / "listed.toml", LISTED)
    if like and not (root / "cache").exists():
        shutil.copytree(like / "cache", root / "cache", ignore=shutil.ignore_patterns("state.json", "stamp.txt", "memo.json"))
    os.fsync = lambda _: None  # type: ignore[assignment,misc]
    done = run_build(open_workspace(root), (), Options(), lambda _: None, runners=runner, linkers={"cpu": _linked})
    if done.failures or done.plan.misses:
        sys.exit(f"{root} could not be built: {[*done.failures.values(), *(action.reason for action in done.plan.misses)][:3]}")


def write_if_other(path: Path, text: str) -> None:
    """Write a text, and keep the file's times where it has it already."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
