"""Owns stand-ins for what needs TVM: a runner that answers in process, a linker, and plug-ins made of plain text.

Knows nothing of workspaces on disk or of what is tested.

A rule's `lower` returns a line of text, a template's `apply` adds to it, and the "object code" is the result: everything
that an answer depends on can be read in it, and its time is a function of its digest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerneldecl.key import digest
from kerneldecl.model import frozen
from kerneldecl.plugins import load_rule, load_template
from kerneldecl.rule import Rule, WorkspaceFile
from kerneldecl.serial import arch_from_json, to_json

Request = Mapping[str, Any]
Answer = dict[str, Any]

RULE = """\
from dataclasses import dataclass

from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature, WorkspaceFile


@dataclass(frozen=True, kw_only=True)
class {name}(Rule):
    n: Extent
    factor: float = 2.0
    dtype: FloatDtype = "float32"
    table: WorkspaceFile = WorkspaceFile("")

    def signature(self):
        return Signature((Arg("X", (self.n,), self.dtype),), (Arg("Y", (self.n,), self.dtype),))

    def lower(self):
        return f"Y[i] = X[i] * {{self.factor}}"

    def reference(self, x):
        return x * self.factor

    def flops(self):
        return self.n
"""
POLICY = """\
from kerneldecl.model import Candidate, Proposal

TEMPLATES = ("unrolled",)
UNROLLS = (1, 2, 4, 8)


def propose(space, arch, top_k, measured):
    if measured:
        return ()
    return tuple(Proposal(Candidate.of("unrolled", {"unroll": u}), 1e-6 * u) for u in UNROLLS[:top_k])
"""
TEMPLATE = """\
def apply(mod, params, arch):
    return f"{mod} unrolled {params['unroll']} times"
"""
ARCH = """\
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


class FakeRunner:
    """Answers every request from its text alone, last one first, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    @property
    def counts(self) -> Counter[str]:
        """How many requests of each kind there were; samples count once for each candidate and entry."""
        sampled = {request["library"] for request in self.asked if request["do"] == "sample"}
        return Counter(request["do"] for request in self.asked if request["do"] != "sample") + Counter(sample=len(sampled))

    def cases(self, *kinds: str) -> set[tuple[str, str]]:
        """Return rule and attributes, as JSON, of the requests of some kinds."""
        cases = [request.get("case", request) for request in self.asked if request["do"] in kinds]
        return {(case["rule"], json.dumps(case["attrs"], sort_keys=True)) for case in cases}

    def run_all(self, requests: Sequence[Request], limit_secs: float) -> Iterator[tuple[int, Answer]]:
        assert limit_secs > 0
        for position in reversed(range(len(requests))):
            yield position, self._answer(requests[position])

    def measure(self, request: Request, limit_secs: float) -> Answer:
        assert limit_secs > 0
        return self._answer(request)

    def _answer(self, request: Request) -> Answer:
        self.asked.append(request)
        # What a worker gets has been through JSON.
        fields = {name: value for name, value in json.loads(json.dumps(request)).items() if name != "do"}
        return json.loads(json.dumps(_ACTIONS[request["do"]](**fields)))


class DieRunner:
    """Must not be asked anything."""

    def run_all(self, requests: Sequence[Request], limit_secs: float) -> Iterator[tuple[int, Answer]]:
        raise AssertionError(f"asked within {limit_secs} s: {requests}")

    def measure(self, request: Request, limit_secs: float) -> Answer:
        raise AssertionError(f"asked within {limit_secs} s: {request}")


class FakeLinker:
    """Joins objects; its library depends on their contents and order, and not on where they lie."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, library: Path, objects: Sequence[Path]) -> None:
        self.calls += 1
        library.write_bytes(b"".join(f"{path.name}\n".encode() + path.read_bytes() for path in objects))


def _rule(root: str, rule: str, attrs: Mapping[str, Any]) -> Rule:
    return load_rule(Path(root), rule)(**{name: frozen(value) for name, value in attrs.items()})


def _computation(root: str, rule: str, attrs: Mapping[str, Any]) -> str:
    declared = _rule(root, rule, attrs)
    table = attrs["table"] and WorkspaceFile((Path(root) / attrs["table"]).read_text(encoding="utf-8"))
    return f"{declared.lower()} [{declared.signature()}] {table}"


def _lower(root: str, rule: str, attrs: Mapping[str, Any]) -> Answer:
    declared = _rule(root, rule, attrs)
    return {
        "computation": digest(_computation(root, rule, attrs).encode()),
        "signature": to_json(declared.signature()),
        "flops": declared.flops(),
        "least_bytes": declared.least_bytes(),
        "tolerance": declared.tolerance(),
        "space": {"blocks": [], "inputs": ["X"], "outputs": ["Y"]},
    }


def _scheduled(root: str, rule: str, attrs: Mapping[str, Any], candidate: Answer, arch: Answer) -> str | None:
    template = load_template(Path(root), candidate["template"])
    made = template.apply(_computation(root, rule, attrs), candidate["params"], arch_from_json(arch))
    return None if made is None else str(made)


def _build(root: str, rule: str, attrs: Mapping[str, Any], candidate: Answer, arch: Answer, folder: str) -> Answer:  # noqa: PLR0913, PLR0917
    scheduled = _scheduled(root, rule, attrs, candidate, arch)
    if scheduled is None:
        return {"failure": "the template does not apply"}
    symbol = f"kd_{digest(_computation(root, rule, attrs).encode())[:20]}"
    content = f"{symbol}: {scheduled} for {dict(arch_from_json(arch).tvm_target)}\n".encode()
    code = digest(content)
    for suffix in (".o", ".so"):
        (Path(folder) / f"{code}{suffix}").write_bytes(content)
    return {"scheduled": digest(scheduled.encode()), "code": code, "code_bytes": len(content), "symbol": symbol}


def _describe(root: str, rule: str, attrs: Mapping[str, Any], candidate: Answer, arch: Answer) -> Answer:
    scheduled = _scheduled(root, rule, attrs, candidate, arch)
    database = {"workloads": [f'["{scheduled}"]'], "trace": [candidate], "target": arch["tvm_target"], "args": []}
    return {"database": json.dumps(database, sort_keys=True), "source": f"# {scheduled}\n"}


def _prepare(root: str, rule: str, attrs: Mapping[str, Any], seed: int) -> Answer:
    assert seed
    assert _rule(root, rule, attrs)
    return {}


def _verify(case: Answer, library: str, symbol: str) -> Answer:
    code = Path(library).read_text(encoding="utf-8")
    assert code.startswith(f"{symbol}: ")
    _prepare(**case)
    if "crashing" in code:
        return {"failure": "its process was killed by SIGSEGV"}
    return {"error": 0.5 if "wrong" in code else 1e-6, "secs": _secs(library)}


def _sample(case: Answer, library: str, symbol: str, calls: int, samples: int) -> Answer:
    assert calls >= 1
    assert _verify(case, library, symbol)["error"] < 0.1, "what was not verified is not timed"
    return {"samples": [_secs(library)] * samples}


def _secs(library: str) -> float:
    """Return between 100 and 200 us, by the digest of the code."""
    return float(f"{1e-4 * (1 + int(Path(library).stem[:8], 16) / 2**32):.4g}")


_ACTIONS = {"lower": _lower, "build": _build, "describe": _describe, "prepare": _prepare, "verify": _verify, "sample": _sample}
