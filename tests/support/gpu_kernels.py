"""Owns kernels for tests on a GPU: built side by side ahead of the tests, run between guards and compared with the rule's reference.

Knows nothing of which there are. Both happen in worker processes of kerneldecl's own: one that hangs or crashes fails its test alone.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kerneldecl.model import Arch, Candidate, IterSpace
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch
from kerneldecl.runners.local import LocalRunner
from kerneldecl.serial import space_from_json, to_json
from kerneldecl.store.keys import symbol

H200 = load_arch(STANDARD, "h200")
CORES = len(os.sched_getaffinity(0))
LIMIT_SECS = 120.0
TOOLS = dict.fromkeys(("tvm", "tvm_ffi", "cuda"), "")
Choice = Callable[[IterSpace, Arch], Sequence[Candidate]]


def given(template: str, *params: Mapping[str, Any]) -> Choice:
    """Choose what a template makes of these parameters, a kernel each."""
    return lambda _space, _arch: [Candidate.of(template, each) for each in params]


def proposed(*policies: str, step: int = 7) -> Choice:
    """Choose the first of 20 candidates, and every so-many-th, of the first policy that proposes any: neighbours are much alike."""

    def choose(space: IterSpace, arch: Arch) -> list[Candidate]:
        found = (importlib.import_module(f"kerneldecl.policies.{name}").propose(space, arch, 20) for name in policies)
        return [proposal.candidate for proposal in next((each for each in found if each), ())[::step]]

    return choose


@dataclass(frozen=True, eq=False)
class Case:
    """A computation and its kernels. A test that has one for a parameter finds it built."""

    name: str
    rule: str
    attrs: Mapping[str, Any]
    choice: Choice
    sms: int = 0
    """Multiprocessors that the kernels are made for, few to give each many tiles; 0 for those that there are."""
    gpu: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the arch that kernels are made for where they are not those of the GPU, such as an older compute capability."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Of the workspace, beside the standard rules."""

    @classmethod
    def numbered(cls, number: int, rule: str, attrs: Mapping[str, Any], choice: Choice) -> Case:
        """Return one that is named by its number and attributes."""
        return cls(f"{number}-{','.join(f'{name}={value}' for name, value in attrs.items())}", rule, attrs, choice)

    def __str__(self) -> str:
        return f"{self.rule}-{self.name}".replace(" ", "")


@dataclass(frozen=True)
class Kernel:
    """One that was built, or why it was not."""

    candidate: Candidate
    library: Path
    symbol: str
    failure: str


@dataclass(frozen=True)
class Made:
    """What became of a case."""

    tolerance: float
    kernels: tuple[Kernel, ...]


class Kernels:
    """The kernels of cases, each built once, in as many processes as there are cores. Use as a context manager."""

    def __init__(self, root: Path) -> None:
        """`root` is a folder for a workspace and for libraries."""
        self.root = root
        self._held = ExitStack()
        self._runner = self._held.enter_context(LocalRunner(CORES, CORES))
        self._threads = ThreadPoolExecutor(CORES)
        self._made: dict[Case, Future[Made]] = {}
        self._number = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._held.close()  # which ends what is being built
        self._threads.shutdown()

    def start(self, case: Case) -> None:
        """Have the case built; the ones that were asked for before come first."""
        if case not in self._made:
            self._made[case] = self._threads.submit(self._build, case)

    def of(self, case: Case) -> Made:
        """Return what was built of a case, once it is."""
        self.start(case)
        return self._made[case].result()

    def described(self, case: Case) -> dict[str, Any]:
        """Return the case as worker processes know it."""
        return {"root": str(self.root), "rule": case.rule, "attrs": dict(case.attrs)}

    def _build(self, case: Case) -> Made:
        for name, text in case.files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text, encoding="utf-8")
        lowered = self._answer({"action": "lower", **self.described(case)})
        assert "failure" not in lowered, lowered
        figures = {"sm_count": case.sms or H200.the_gpu.sm_count, **case.gpu}
        arch = replace(H200, gpu=replace(H200.the_gpu, **figures))
        chosen = case.choice(space_from_json(lowered["space"]), arch)
        return Made(lowered["tolerance"], tuple(self._kernel(case, candidate, arch, lowered["computation"]) for candidate in chosen))

    def _kernel(self, case: Case, candidate: Candidate, arch: Arch, computation: str) -> Kernel:
        folder = self.root / "kernels" / str(next(self._number))
        folder.mkdir(parents=True)
        described = {**self.described(case), "cache": str(self.root / "cache"), "computation": computation}
        fields = {"candidate": candidate.to_json(), "arch": to_json(arch), "toolchain": TOOLS, "folder": str(folder), "force": True}
        answer = self._answer({"action": "build", "spec": described, **fields})
        library = folder / f"{answer.get('code_digest', '')}.so"
        return Kernel(candidate, library, symbol(computation), f"{answer.get('failure', '')} {answer.get('diagnostics', '')}".strip())

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        [(_, answer)] = self._runner.run_all([request], LIMIT_SECS)
        return answer


class Checked:
    """The process that runs kernels on the GPU, and holds it. Use as a context manager."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._held = ExitStack()
        self._runner = self._held.enter_context(LocalRunner(1, CORES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def __call__(self, case: Case) -> None:
        """Run each kernel of a case on poisoned outputs; fail where one writes elsewhere or is beyond the rule's tolerance."""
        made = self._kernels.of(case)
        assert made.kernels, "nothing to run"
        told = {str(kernel.candidate): self._wrong(case, kernel, made.tolerance) for kernel in made.kernels}
        assert not any(told.values()), {candidate: words for candidate, words in told.items() if words}

    def _wrong(self, case: Case, kernel: Kernel, tolerance: float) -> str:
        if kernel.failure:
            return kernel.failure
        at_hand = {"device": "cuda", "model": H200.model, "spec": {**self._kernels.described(case), "seed": 0}}
        request = {"action": "verify", **at_hand, "library": str(kernel.library), "symbol": kernel.symbol}
        answer = self._runner.measure(request, LIMIT_SECS)
        if "failure" in answer:
            return str(answer["failure"])
        return "" if answer["error"] <= tolerance else f"relative error {answer['error']:.3g} over {tolerance:.3g}"
