"""Owns what lower, propose and tune records hold, as types: an entry's computation, its candidates, its winner.

Knows nothing of how records are kept or made. A value wraps a record's JSON and reads it when asked: a plan of ten thousand entries
parses no iteration space.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kerneldecl.errors import ArtifactError
from kerneldecl.limits import BUDGET, Budget
from kerneldecl.model import Candidate, IterSpace, Proposal, Trial, Value, frozen
from kerneldecl.serial import misfit, space_from_json, trial_from_json
from kerneldecl.store.keys import digest
from kerneldecl.store.record_text import Fields, field_text

Json = Mapping[str, Any]

_UNTOLD = frozenset({"space", "names", "signature"})
BLOBS = ("object", "database", "source")
"""Blobs that a tune record names of its winner: the object file, the lines for TVM's database, the scheduled TensorIR."""


@contextlib.contextmanager
def _as_recorded(what: str) -> Iterator[None]:
    """Turn what a record of other types leads to into an ArtifactError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"a record's {what} damaged ({type(error).__name__}: {error}); remove the record and build again") from None


@dataclass(frozen=True)
class Lowered:
    """A computation: what lowering a workload's rule found out."""

    json: Json

    @property
    def computation(self) -> str:
        """Digest of the canonical TensorIR."""
        return str(self.json["computation"])

    @property
    def names(self) -> str:
        """Digest of the function with the names of its variables, buffers and blocks; empty in records that do not tell."""
        return str(self.json.get("names", ""))

    @property
    def signature(self) -> Json:
        """Inputs and outputs, each with name, shape and dtype, as JSON."""
        return self.json["signature"]  # type: ignore[no-any-return]

    @property
    def flops(self) -> float:
        """Arithmetic operations of one call; a fused multiply-add is two."""
        return float(self.json["flops"])

    @property
    def least_bytes(self) -> float:
        """Bytes that one call moves at least: each argument once."""
        return float(self.json["least_bytes"])

    @property
    def tolerance(self) -> float:
        """Relative error that the rule allows."""
        return float(self.json["tolerance"])

    @property
    def space_json(self) -> Json:
        """The iteration space as JSON; raise ArtifactError where the record holds none."""
        with _as_recorded("iteration space is"):
            return self.json["space"]  # type: ignore[no-any-return]

    @functools.cached_property
    def space(self) -> IterSpace:
        """The iteration space; raise ArtifactError where the record holds none."""
        with _as_recorded("iteration space is"):
            space = space_from_json(self.json["space"])
            if wrong := misfit(space, IterSpace, "space"):
                raise TypeError(wrong)
            return space

    @property
    def varying(self) -> tuple[tuple[int, int], ...]:
        """Argument and dimension of each extent that is the number of rows, where that is known when the kernel is called."""
        return tuple((int(arg), int(dim)) for arg, dim in self.json.get("varying", ()))

    @property
    def any_rows(self) -> str:
        """Digest of the computation of any number of rows; empty where the number is fixed."""
        return str(self.json.get("any_rows", ""))

    @property
    def dtype(self) -> str:
        """What the first input is read as (`IterSpace.dtype`), without reading the rest of the space."""
        with _as_recorded("iteration space is"):
            first, blocks = self.space_json["inputs"][:1], self.space_json["blocks"]
            return str(next((read["dtype"] for block in blocks for read in block["reads"] if read["operand"] in first), "float32"))

    def described(self) -> list[tuple[str, str]]:
        """Return all but iteration space and names as pairs: what an artifact's manifest says of the computation."""
        scalars = self.json.parsed if type(self.json) is Fields else self.json
        told = [(name, str(scalars[name])) for name in sorted(scalars) if name not in _UNTOLD]
        return [*told, ("signature", field_text(self.json, "signature"))]


@dataclass(frozen=True)
class Group:
    """What one policy proposes for a computation."""

    policy: str
    count: int
    digest: str
    """Digest of the candidates in their order, without the times that are expected of them."""
    templates: tuple[str, ...]
    """Names of the templates that the candidates name."""
    searches: bool
    """Whether the policy proposes more once these are measured."""
    text: str
    """The proposals as JSON."""
    turn: int = 0
    """Place of the declared policy in the entry's list: what one turn has measured starts the next."""
    options: str = ""
    """Options of a tuner, defaults filled in, as JSON, of one that lists all at once its limits alone; empty where there are none."""
    sources: str = ""
    """Where the configuration of each proposal comes from, as JSON; empty where they come from no record."""

    @property
    def source_of(self) -> dict[Candidate, Mapping[str, str]]:
        """Where the configuration of each candidate comes from that was fitted to this computation."""
        return {each.candidate: source for each, source in zip(self.proposals, json.loads(self.sources or "[]"), strict=False)}

    @property
    def budget(self) -> Budget:
        """What this policy alone may take."""
        options = json.loads(self.options) if self.options else {}
        return tuple((name, float(options[name])) for name in BUDGET if options.get(name))

    @property
    def in_key(self) -> str:
        """What a tuning's key has of it: a tuner's options, or count and digest of what is proposed, and the limits of that."""
        listed = "" if self.searches and self.options else f"{self.count} {self.digest}"
        return " ".join(filter(None, (listed, self.options)))

    @functools.cached_property
    def proposals(self) -> tuple[Proposal, ...]:
        """The candidates, best first."""
        return tuple(Proposal(Candidate.of(name, _frozen(params)), secs) for name, params, secs in json.loads(self.text))


def _frozen(params: Json) -> dict[str, Value]:
    return {name: frozen(value) for name, value in params.items()}


class Proposed(NamedTuple):
    """What one policy proposes, before it is a record."""

    policy: str
    proposals: Sequence[Proposal]
    searches: bool
    turn: int = 0
    options: Json | None = None
    """Options of a tuner, defaults filled in, of which it may have none; None where the policy is no tuner."""
    templates: Sequence[str] = ()
    """Templates that later proposals may name."""
    sources: Sequence[Mapping[str, str]] = ()
    """Where the configuration of each proposal comes from, if from a record."""


def groups_to_json(groups: Iterable[Proposed]) -> dict[str, Any]:
    """Return what a propose record holds."""
    return {"groups": [_group_json(group) for group in groups]}


def _group_json(group: Proposed) -> dict[str, Any]:
    listed = [[each.candidate.template, dict(each.candidate.params), float(f"{each.predicted_secs:.4g}")] for each in group.proposals]
    named = [[template, params] for template, params, _ in listed]
    found = {
        "policy": group.policy,
        "count": len(listed),
        "digest": digest(_compact(named).encode()),
        "templates": sorted({*group.templates, *(each.candidate.template for each in group.proposals)}),
        "searches": group.searches,
        "text": _compact(listed),
    }
    is_tuner = group.options is not None
    more = {"turn": group.turn, "options": json.dumps(group.options, separators=(",", ":"), sort_keys=True) if is_tuner else ""}
    more["sources"] = _compact([dict(source) for source in group.sources]) if group.sources else ""
    return {**found, **{name: value for name, value in more.items() if value}}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def groups_from_json(result: Json) -> tuple[Group, ...]:
    """Return what a propose record holds."""
    return tuple([_group(**group) for group in result["groups"]])


def _group(*, policy: str, count: int, digest: str, templates: Sequence[str], searches: bool, text: str, **more: Any) -> Group:
    # Ten thousand records name the same few policies, lists and templates.
    return Group(sys.intern(policy), count, sys.intern(digest), tuple(map(sys.intern, templates)), searches, text, **more)


@dataclass(frozen=True)
class TuneResult:
    """An entry's winner, and all that competed with it."""

    key: str
    """Key of the record."""
    json: Json

    @property
    def computation(self) -> str:
        return str(self.json["computation"])

    @property
    def symbol(self) -> str:
        return str(self.json["symbol"])

    @property
    def tolerance(self) -> float:
        return float(self.json["tolerance"])

    @property
    def policy(self) -> str:
        """Name of the policy that proposed the winner."""
        return str(self.json["policy"])

    @property
    def idea_of(self) -> Mapping[str, str]:
        """Where the winner's configuration was measured first: record, arguments and device; empty where it comes from no record."""
        return self.json.get("idea_of", {})  # type: ignore[no-any-return]

    @functools.cached_property
    def winner(self) -> Candidate:
        return Candidate.from_json(self.json["winner"])

    @property
    def is_measured(self) -> bool:
        """Whether the winner was measured, and is not only its policy's first choice."""
        return bool(self.json["is_measured"])

    @property
    def coverage(self) -> str:
        """How many of the wanted candidates were measured, as "20 of 25"; empty where all were, or none."""
        measured, wanted = self.json.get("measured", 0), self.json.get("wanted", 0)
        return f"{measured} of {wanted}" if self.is_measured and measured != wanted else ""

    @property
    def is_verified(self) -> bool:
        """Whether the winner agrees with the reference of now; one that was timed may have been verified by an earlier reference."""
        return self.error is not None

    @property
    def is_settled(self) -> bool:
        """Whether no measurement is wanting."""
        return self.is_measured and self.is_verified and not self.coverage

    @property
    def run_secs(self) -> float:
        """Median seconds of one call; predicted where the winner was not measured."""
        return float(self.json["run_secs"])

    @property
    def error(self) -> float | None:
        """Largest relative error against the reference; None where it never ran."""
        return None if self.json["error"] is None else float(self.json["error"])

    @property
    def tied(self) -> int:
        """How many others noise cannot tell from the winner."""
        return int(self.json["tied"])

    @property
    def build_key(self) -> str:
        return str(self.json["build_key"])

    @property
    def blobs(self) -> dict[str, str]:
        """Digests of the winner's blobs, by their names in `BLOBS`."""
        return {name: str(self.json[name]) for name in BLOBS}

    def described(self) -> tuple[object, ...]:
        """Return what an artifact's manifest says of the winner, and its blobs.

        What else the record holds follows from its key and the winner's code; but a tuning that is repeated has other times.
        """
        return (self.key, *self.blobs.values(), self.run_secs, self.error, self.coverage, sorted(self.provenance.items()))

    @functools.cached_property
    def trials(self) -> list[Trial]:
        """All candidates, winner first; raise ArtifactError where the record holds anything else."""
        with _as_recorded("candidates are"):
            trials = [trial_from_json(trial) for trial in self.json["trials"]]
            wrong = [place for at, trial in enumerate(trials) if (place := misfit(trial, Trial, f"trials[{at}]"))]
            if wrong or not trials:
                raise TypeError(wrong[0] if wrong else "there are none")
            return trials

    @property
    def tensor_cores(self) -> str:
        """ "used", which may be followed by why not by wgmma, or why the winner does without; empty where they are out of the question."""
        return str(self.json.get("tensor_cores", ""))

    @property
    def before(self) -> Sequence[Json]:
        """Who had timed the best candidates before they were timed again (`build --reverify`), and how: earliest first."""
        return self.json.get("before", ())  # type: ignore[no-any-return]

    @property
    def measured_on(self) -> Json:
        """Which GPU of the machine has measured it: `gpu` and `pci`; nothing where that is not known."""
        conditions = self.json.get("conditions")
        found = conditions.get("measured_on") if isinstance(conditions, dict) else None
        return {name: value for name, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}

    @property
    def provenance(self) -> Json:
        return self.json["provenance"]  # type: ignore[no-any-return]
