"""Owns what runners tell while they answer requests: what was printed, and which process was busy with what, from when to when.

Knows nothing of builds, or of how events are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Printed:
    """What a plug-in or a tool has printed while a worker answered a request, such as `lower matmul`."""

    request: str
    text: str


@dataclass(frozen=True)
class Ran:
    """A request that a process has answered."""

    request: str
    """In a few words: `build gpu_matmul`."""
    process: str
    """What the process is for, where, and which one: `compile 4711`, `measure cuda 4712`, `compile node7 815`."""
    began: float
    """Seconds since the epoch, UTC."""
    secs: float
    computation: str = ""
    """Digest of the computation that it was for; empty where the request names none."""
    failure: str = ""


Heard = Callable[[Printed | Ran], None]


def described(request: Mapping[str, Any]) -> str:
    """Return what a request is, in a few words: `lower matmul`."""
    spec = request.get("spec", request)
    candidate = request.get("candidate", {}).get("template", "")
    return " ".join(filter(None, (str(request.get("action", "")), str(spec.get("rule", "")), candidate)))


def computation_of(request: Mapping[str, Any]) -> str:
    """Return the digest of the computation that a request is for; empty where it names none."""
    return str(request.get("spec", {}).get("computation", ""))
