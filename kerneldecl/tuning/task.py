"""Owns a workload under tuning, and the requests that are made to workers for it.

Knows nothing of policies, of the order of requests or of what is made of their answers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from kerneldecl.limits import Limits
from kerneldecl.model import SPECIALIZE, Arch, Candidate, Trial, Workload
from kerneldecl.plugins.find import is_own
from kerneldecl.rows import rows_field
from kerneldecl.runners.process import Answer, Answers
from kerneldecl.serial import arch_to_json, trial_to_json
from kerneldecl.store import keys
from kerneldecl.store.results import Group, Lowered
from kerneldecl.tuning.budget import EndedBy

BUILD_SECS, PROPOSE_SECS = Limits().build_secs, Limits().propose_secs
SEARCH_SECS = Limits().search_secs
PREPARE_SECS, VERIFY_SECS = Limits().prepare_secs, Limits().verify_secs
"""Limits of one request where the user declares no others. What takes longer is tried once more, and has then failed in this build."""
Doing = Literal["timed", "final", "verify"]
"""What is done with a batch: all of it is verified and raced, raced once more, or verified."""
OnProgress = Callable[[str, int, int, float | None], None]
"""Gets progress: what is going on, how many candidates of how many, best seconds so far."""


class Runner(Protocol):
    """Runs requests in processes of their own: several that build, one that measures.

    A request is a JSON object whose `action` names a function of the process, and whose other fields are its arguments. An answer is what
    the function returned, or `{"failure": ...}` where it raised, took longer than its limit, or its process died.
    """

    def start(self, count: int) -> None:
        """Have so many of the processes that build start before they are asked, if there are so many, and do not wait for them."""
        ...

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float, priority: int = 0) -> Answers:
        """Have requests answered, several at a time; of those that wait, the ones of a lower priority number come first."""
        ...

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        """Return the answer of the one process that measures."""
        ...

    def side_by_side(self, model: str, most: int) -> Sequence[Runner]:
        """Return runners that share what builds, and measure at the same time, each on a GPU of the model; itself where there is one."""
        ...


class Batches(Protocol):
    """Measures candidates where their device is, a batch at a time: a word for each sample would take longer than the sample.

    A runner that measures elsewhere has one as its attribute `batches`. Entries then have their turns side by side.
    """

    def why_not(self, arch: Arch) -> str:
        """Return why nothing can be measured for an arch, as a sentence; empty where it can."""
        ...

    def is_here(self, arch: Arch) -> bool:
        """Say whether this machine measures for an arch for which something can be measured."""
        ...

    def measured(self, doing: Doing, task: Task, trials: Sequence[Trial]) -> list[Trial]:
        """Return what `tuning/batch.py` makes of the trials on a device of the task's arch."""
        ...

    def measured_on(self, task: Task) -> dict[str, Any]:
        """Return what `tuning/measure.py` says of the device that has measured the task last."""
        ...


def batches_of(runner: Runner) -> Batches | None:
    """Return what measures the runner's batches elsewhere; None where the runner measures itself, request by request."""
    found: Batches | None = getattr(runner, "batches", None)
    return found


def spec_of(root: Path, cache: Path, workload: Workload, lowered: Lowered, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a worker needs to know of a workload to lower it and make its inputs; `shared` is the cache behind the store, if any."""
    where = {"root": str(root), "cache": str(cache), **({"shared": shared} if shared else {})}
    names = {
        **where,
        "rule": workload.rule,
        "attrs": dict(workload.attrs),
        **workload.nan_field,
        **rows_field(workload.rows, workload.attrs),
    }
    custom = {SPECIALIZE: workload.specialize} if workload.specialize else {}
    return {**names, "computation": lowered.computation, **keys.named(lowered.names), **custom}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One workload to be tuned, with what planning found out about it."""

    root: Path
    """Folder of the sources: rules, policies, templates, and the files that attributes name."""
    cache: Path
    """Folder of the store."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """URL and trusted keys of the cache that workers read from, where one is used."""
    workload: Workload
    arch: Arch
    groups: tuple[Group, ...]
    """What is proposed for it without any measurement."""
    lowered: Lowered
    tolerance: float
    protocol: str
    """How candidates are timed."""
    seed: int
    """Of the inputs."""
    reference_digest: str
    """Digest of what verdicts depend on besides the kernel."""
    toolchain: Mapping[str, str]
    folder: Path
    """Folder for objects and libraries of candidates until the winner is known."""
    variants: int = 0
    """How many custom kernels of the user's compete."""
    is_again: bool = False
    """Whether its candidates are verified and timed whatever is known of their code."""
    times_finalists: bool = True
    """Whether finalists are timed under the protocols that do not choose them, too: a record holds all."""
    has_spares: bool = False
    """Whether its groups are their policies' own lists, so that a longer list has others for candidates that cannot be built."""
    tuners: frozenset[str] = frozenset()
    """Policies that list all they have at once, or search: they have no longer list."""
    build_archs: Mapping[Candidate, Arch] = field(default_factory=dict)
    """Archs that single candidates are built for instead: the same GPU with fewer features."""
    known: Mapping[Candidate, Trial] = field(default_factory=dict)
    """What earlier searches found out about candidates."""
    reference: Mapping[str, Any] = field(default_factory=dict)
    """Root, rule and attributes that inputs and reference come from, where they are not the workload's own."""
    has_judged: Callable[[], bool] | None = None
    """Says whether its reference has judged a kernel before this build; None where nobody knows."""
    ended_by: EndedBy | None = None
    """Says whether its search is to end with what it has; None where nothing from outside ends it."""
    priority: int = 0
    """Place in the order of tuning: its requests to workers come before those that are made early for later entries."""

    @functools.cached_property
    def spec(self) -> dict[str, Any]:
        """Return what a worker needs to know of the workload to lower it and to make its inputs."""
        return spec_of(self.root, self.cache, self.workload, self.lowered, self.shared)

    @functools.cached_property
    def measured_spec(self) -> dict[str, Any]:
        """Return what a worker needs to know to verify and to time kernels of the workload."""
        return {**self.spec, **self.reference, "seed": self.seed}

    @property
    def has_own_rule(self) -> bool:
        """Say whether inputs and reference come from a file of the user's, which may have mistakes."""
        spec = self.measured_spec
        return is_own("rules", Path(spec["root"]), spec["rule"])

    def measure_request(self, action: str, **fields: object) -> dict[str, Any]:
        return {"action": action, "device": self.arch.kind, "model": self.arch.model, **fields}

    def specialize_request(self) -> dict[str, Any]:
        return {"action": "specialize", "spec": self.spec, "arch": arch_to_json(self.arch)}

    def next_request(self, policy: str, options: str, trials: Sequence[Trial]) -> dict[str, Any]:
        """Return the request that asks a policy that searches; a tuner has options."""
        asked = {"space": self.lowered.space_json, "arch": arch_to_json(self.arch), "top_k": self.workload.top_k, "spec": self.spec}
        found = [trial_to_json(trial) for trial in trials]
        where = {"device": "policy", "model": "", "root": str(self.root), "policy": policy}
        action = {"action": "ask", "options": options} if options else {"action": "propose_next"}
        return {**action, **where, "asked": asked, "trials": found}

    def more_request(self, policy: str, top_k: int) -> dict[str, Any]:
        """Return the request that asks a policy for a longer list than the declared `top_k` gives."""
        where = {"device": "policy", "model": "", "root": str(self.root), "policies": [[[policy], None]]}
        asked = {"space": self.lowered.space_json, "arch": arch_to_json(self.arch), "top_k": top_k}
        return {"action": "propose", **where, **asked}

    def build_request(self, candidate: Candidate, *, force: bool = False) -> dict[str, Any]:
        arch = arch_to_json(self.build_archs.get(candidate, self.arch))
        where = {"arch": arch, "toolchain": dict(self.toolchain), "folder": str(self.folder)}
        return {"action": "build", "spec": self.spec, "candidate": candidate.to_json(), **where, "force": force}

    def describe_request(self, candidate: Candidate) -> dict[str, Any]:
        return {"action": "describe", "spec": self.spec, "candidate": candidate.to_json(), "arch": arch_to_json(self.arch)}

    def computation_request(self) -> dict[str, Any]:
        return {"action": "computation", "spec": self.spec}

    def object_path(self, code_digest: str) -> Path:
        return self.folder / f"{code_digest}.o"

    def library_path(self, code_digest: str) -> Path:
        return self.folder / f"{code_digest}.so"

    def has_object(self, code_digest: str) -> bool:
        return self.object_path(code_digest).exists()
