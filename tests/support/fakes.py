"""Owns stand-ins for what needs TVM: a runner that answers in process, a linker, and plug-ins made of plain text.

Knows nothing of workspaces on disk or of what is tested.

A rule's `lower` returns a line of text, a template's `apply` adds to it, and the "object code" is the result: everything
that an answer depends on can be read in it, and its time is a function of its digest.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerneldecl.errors import DeclarationError
from kerneldecl.model import Arch
from kerneldecl.plugins.load import custom_kernels, load_module, load_rule
from kerneldecl.rule import Rule
from kerneldecl.serial import arch_from_json, to_json
from kerneldecl.store.keys import build_manifest, digest, key
from kerneldecl.store.local import LocalStore, Record
from kerneldecl.tuning.propose import propose, propose_next

Request = Mapping[str, Any]
Answer = dict[str, Any]

RULE = """\
from dataclasses import dataclass
from pathlib import Path

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
        table = Path(self.table).read_text() if self.table else ""
        return f"Y[i] = X[i] * {{self.factor}} {{table}}"

    def reference(self, x):
        return x * self.factor

    def flops(self):
        return self.n
"""
POLICY = """\
from kerneldecl.model import Candidate, Proposal

TEMPLATES = ("unrolled",)
UNROLLS = (1, 2, 4, 8)


def propose(space, arch, top_k):
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
        self.compiled = 0
        self.started = 0
        """Processes that were told to start before anything was asked."""

    @property
    def counts(self) -> Counter[str]:
        """How many requests of each kind there were; samples count once for each candidate, builds as far as they compile."""
        sampled = {request["library"] for request in self.asked if request["action"] == "sample"}
        asked = Counter(request["action"] for request in self.asked if request["action"] not in {"sample", "build"})
        return +(asked + Counter(sample=len(sampled), compile=self.compiled))

    def cases(self, *kinds: str) -> set[str]:
        """Return rule and attributes, as JSON, of the requests of some kinds."""
        cases = [request.get("spec", request) for request in self.asked if request["action"] in kinds]
        return {json.dumps([spec["rule"], spec["attrs"]], sort_keys=True) for spec in cases}

    def start(self, count: int) -> None:
        self.started = 0 if self.asked else count

    def run_all(self, requests: Sequence[Request], limit_secs: float, priority: int = 0) -> Iterator[tuple[int, Answer]]:
        assert limit_secs > 0
        assert priority >= 0
        for position in reversed(range(len(requests))):
            yield position, self._answer(requests[position])

    def measure(self, request: Request, limit_secs: float) -> Answer:
        assert limit_secs > 0
        return self._answer(request)

    def side_by_side(self, model: str, most: int) -> Sequence[FakeRunner]:
        assert most > 0
        assert model is not None
        return (self,)

    def _answer(self, request: Request) -> Answer:
        self.asked.append(request)
        # What a worker gets has been through JSON.
        fields = {name: value for name, value in json.loads(json.dumps(request)).items() if name not in {"action", "device", "model"}}
        answer: Answer = json.loads(json.dumps(_ACTIONS[request["action"]](**fields)))
        self.compiled += answer.pop("compiled", 0)
        return answer


class DieRunner:
    """Must not be asked anything."""

    def start(self, count: int) -> None:
        assert not count

    def run_all(self, requests: Sequence[Request], limit_secs: float, priority: int = 0) -> Iterator[tuple[int, Answer]]:
        assert not requests, f"asked within {limit_secs} s, of priority {priority}: {requests}"
        return iter(())

    def measure(self, request: Request, limit_secs: float) -> Answer:
        raise AssertionError(f"asked within {limit_secs} s: {request}")

    def side_by_side(self, model: str, most: int) -> Sequence[DieRunner]:
        raise AssertionError(f"asked for {most} of {model}")


class FakeLinker:
    """Joins objects; its library depends on their contents and order, and not on where they lie."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, library: Path, objects: Sequence[Path]) -> None:
        self.calls += 1
        library.write_bytes(b"".join(f"{path.name}\n".encode() + path.read_bytes() for path in objects))


def _rule(root: str, rule: str, attrs: Mapping[str, Any]) -> Rule:
    path = Path(root)
    return _loaded(load_rule, path, rule, (path / f"rules/{rule}.py").read_bytes()).of(path, attrs)


@functools.lru_cache(maxsize=64)
def _loaded(load: Callable[[Path, str], Any], root: Path, name: str, content: bytes) -> Any:
    """Return a plug-in, loaded once for each content of its file."""
    assert content
    return load(root, name)


def _load_template(root: Path, name: str) -> Any:
    return load_module("templates", root, name)


def _computation(root: str, rule: str, attrs: Mapping[str, Any]) -> str:
    declared = _rule(root, rule, attrs)
    return f"{declared.lower()} [{declared.signature()}]"


def _lower(root: str, rule: str, attrs: Mapping[str, Any]) -> Answer:
    if attrs["factor"] == 0:
        return {"failure": "ValueError: nothing to compute"}
    declared = _rule(root, rule, attrs)
    return {
        "computation": digest(_computation(root, rule, attrs).encode()),
        "signature": to_json(declared.signature()),
        "flops": declared.flops(),
        "least_bytes": declared.least_bytes(),
        "tolerance": declared.tolerance(),
        "space": {"blocks": [], "inputs": ["X"], "outputs": ["Y"]},
    }


def _scheduled(spec: Answer, candidate: Answer, arch: Arch) -> str | None:
    text = _computation(spec["root"], spec["rule"], spec["attrs"])
    assert digest(text.encode()) == spec["computation"]
    root, name = Path(spec["root"]), candidate["template"]
    if name == "specialize":
        return _own(spec, arch)[candidate["params"]["variant"]]
    template = _loaded(_load_template, root, name, (root / f"templates/{name}.py").read_bytes())
    made = template.apply(text, candidate["params"], arch)
    return None if made is None else str(made)


def _own(spec: Answer, arch: Arch) -> list[str]:
    return custom_kernels(Path(spec["root"]), spec["specialize"], _computation(spec["root"], spec["rule"], spec["attrs"]), arch)


def _specialize(spec: Answer, arch: Answer) -> Answer:
    try:
        return {"variants": len(_own(spec, arch_from_json(arch)))}
    except DeclarationError as error:
        return {"failure": str(error)}


def _build(spec: Answer, candidate: Answer, arch: Answer, toolchain: Answer, folder: str, *, force: bool) -> Answer:
    parsed = arch_from_json(arch)
    scheduled = _scheduled(spec, candidate, parsed)
    if scheduled is None:
        return {"failure": "the template does not apply"}
    symbol = f"kd_{spec['computation'][:20]}"
    manifest = build_manifest(digest(scheduled.encode()), symbol, parsed, toolchain)
    store = LocalStore(Path(spec["cache"]))
    known = store.read("build", key(manifest), is_local=True)
    if isinstance(known, Record) and not force:
        return {"schedule_digest": digest(scheduled.encode()), **known.result}
    content = f"{symbol}: {scheduled} for {dict(parsed.tvm_target)}\n".encode()
    built = {"code_digest": digest(content), "code_bytes": len(content)}
    for suffix in (".o", ".so"):
        (Path(folder) / f"{built['code_digest']}{suffix}").write_bytes(content)
    store.write("build", manifest, built, is_local=True)
    return {"schedule_digest": digest(scheduled.encode()), **built, "compiled": 1}


def _describe(spec: Answer, candidate: Answer, arch: Answer) -> Answer:
    scheduled = _scheduled(spec, candidate, arch_from_json(arch))
    database = {
        "workloads": [json.dumps([scheduled])],
        "trace": [[["Tensorize" if "tensorized" in scheduled else "Candidate", [], [candidate], []]], []],
        "target": arch["tvm_target"],
        "args": [],
    }
    if "traceless" in scheduled:
        database = {"function": scheduled}
    return {"database": json.dumps(database, sort_keys=True), "source": f"# {scheduled}\n"}


def _ir(spec: Answer) -> Answer:
    return {"ir": _computation(spec["root"], spec["rule"], spec["attrs"])}


def _reference_of(roots: list[str], asked: Answer, computation: str, file: str) -> Answer:
    """Return the workload itself where the file holds its computation: no standard rule computes what text is."""
    assert len(roots) == 1
    assert {"rule", "attrs"} <= asked.keys(), "a worker looks for a standard rule with these attributes"
    if not Path(file).is_file() or digest(Path(file).read_bytes()) != computation:
        return {"failure": f"ValueError: rule {asked['rule']} computes something else here, or is not here"}
    return {"root": str(Path(file).parents[1]), **asked}


def _prepare(spec: Answer) -> Answer:
    assert spec["seed"]
    assert _rule(spec["root"], spec["rule"], spec["attrs"])
    return {}


def _verify(spec: Answer, library: str, symbol: str) -> Answer:
    _prepare(spec)
    code = Path(library).read_text(encoding="utf-8")
    assert code.startswith(f"{symbol}: ")
    if "crashing" in code:
        return {"failure": "its process was killed by SIGSEGV"}
    return {"error": 0.5 if "wrong" in code else 1e-6, "secs": _secs(library)}


def _sample(spec: Answer, library: str, symbol: str, calls: int, samples: int, protocol: str) -> Answer:
    code = Path(library).read_text(encoding="utf-8")
    assert spec["seed"]
    assert calls >= 1
    assert code.startswith(f"{symbol}: ")
    return {"samples": [_secs(library) * PROTOCOL_SECS[protocol]] * samples}


def _measured_peaks() -> Answer:
    return {"flops_per_s": 1e11, "bytes_per_s": 1e10}


PROTOCOL_SECS = {"cool": 1.0, "steady": 1.0, "isolated": 4.0, "chained": 2.0}
"""Times under each protocol, by the shortest."""


def _secs(library: str) -> float:
    """Return between one and two seconds, by the digest of the code: what is slow is sampled least often."""
    return float(f"{1 + int(Path(library).stem[:8], 16) / 2**32:.4g}")


_ACTIONS: Mapping[str, Callable[..., Answer]] = {
    "lower": _lower,
    "propose": propose,
    "propose_next": propose_next,
    "specialize": _specialize,
    "build": _build,
    "describe": _describe,
    "computation": _ir,
    "reference_of": _reference_of,
    "prepare": _prepare,
    "prepare_next": _prepare,
    "verify": _verify,
    "confirm": _verify,
    "sample": _sample,
    "measured_peaks": _measured_peaks,
    "is_there": dict,
}
