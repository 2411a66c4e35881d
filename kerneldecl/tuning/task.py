"""Owns a workload under tuning, and the requests that are made to workers for it.

Knows nothing of policies, of the order of requests or of what is made of their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kerneldecl.model import SPECIALIZE, Arch, Candidate, Workload
from kerneldecl.runners.process import Answer
from kerneldecl.serial import to_json

Answers = Iterator[tuple[int, Answer]]
"""Each with the position of its request, in the order in which they come."""
BUILD_SECS = 60.0
PREPARE_SECS = 120.0
VERIFY_SECS = 20.0
"""Limits for one request; a candidate that takes longer has failed."""


class Runner(Protocol):
    """Runs requests in processes of their own."""

    def start(self, count: int) -> None:
        """Have so many of the processes that build start before they are asked, if there are so many, and do not wait for them."""
        ...

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float, priority: int = 0) -> Answers:
        """Have requests answered, several at a time, waiting ones by ascending priority."""
        ...

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        """Return the answer of the one process that measures."""
        ...


@dataclass(frozen=True)
class Task:
    """One workload to be tuned, with what planning found out about it."""

    root: Path
    workload: Workload
    arch: Arch
    policies: tuple[str, ...]
    lowered: Mapping[str, Any]
    tolerance: float
    protocol: Mapping[str, Any]
    toolchain: Mapping[str, str]
    folder: Path
    """Where objects and libraries of candidates go until the winner is known."""
    variants: int = 0
    """How many functions of the user's own compete."""
    turn: int = 0
    """Its place in the order of tuning: what it asks of workers comes before what is asked ahead for later ones."""

    @property
    def case(self) -> dict[str, Any]:
        """Return what a worker needs to know of the workload to lower it and to make its inputs."""
        names = {"root": str(self.root), "rule": self.workload.rule, "attrs": dict(self.workload.attrs)}
        own = {SPECIALIZE: self.workload.specialize} if self.workload.specialize else {}
        return {**names, "computation": self.lowered["computation"], **own}

    @property
    def measured_case(self) -> dict[str, Any]:
        """Return what a worker needs to know to check and to time kernels of the workload."""
        return {**self.case, "seed": self.protocol["seed"]}

    def measure_request(self, action: str, **fields: object) -> dict[str, Any]:
        return {"do": action, "device": self.arch.kind, "model": self.arch.model, **fields}

    def specialize_request(self) -> dict[str, Any]:
        return {"do": "specialize", "case": self.case, "arch": to_json(self.arch)}

    def build_request(self, candidate: Candidate, *, afresh: bool = False) -> dict[str, Any]:
        where = {"arch": to_json(self.arch), "toolchain": dict(self.toolchain), "folder": str(self.folder)}
        return {"do": "build", "case": self.case, "candidate": candidate.to_json(), **where, "afresh": afresh}

    def describe_request(self, candidate: Candidate) -> dict[str, Any]:
        return {"do": "describe", "case": self.case, "candidate": candidate.to_json(), "arch": to_json(self.arch)}

    def object_path(self, code: str) -> Path:
        return self.folder / f"{code}.o"

    def library_path(self, code: str) -> Path:
        return self.folder / f"{code}.so"

    def has_object(self, code: str) -> bool:
        return self.object_path(code).exists()


Step = Callable[[str, int, int, float | None], None]
"""Hears of progress: what is going on, how many candidates of how many, best seconds so far."""
