"""Owns what earlier searches of a computation found out, whichever list their candidates stood in.

Knows nothing of how candidates are built or measured. A list of candidates has its own record; a candidate that stands in several lists
is measured once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kerneldecl.model import Candidate, Trial
from kerneldecl.runners import failures
from kerneldecl.runners.verdict import why_wrong
from kerneldecl.store.keys import lines_of
from kerneldecl.store.local import Record
from kerneldecl.store.results import TuneResult
from kerneldecl.tuning.race import excluded

_SUBJECT = ("computation", "arch.model", "search.generation", "search.protocol")
"""Lines of a tune manifest that tell of what and how candidates are timed."""
_NOT_REPEATED = ("its process", "inputs or reference")
"""How failures begin that a candidate may have met by chance: the next search tries it again."""


@dataclass(frozen=True)
class Search:
    """An earlier search of a computation on a device."""

    result: TuneResult
    setting: frozenset[tuple[str, str]]
    """What made its candidates kernels, besides their templates: tools, code generation, target."""
    templates: Mapping[str, str]
    """Digest of each template."""
    reference: str
    """Digest of what its verdicts were judged by."""
    names: str
    """Digest of the names in its computation: others make another object of the same schedule, which takes the same time."""

    @functools.cached_property
    def timed(self) -> frozenset[Candidate]:
        return frozenset(trial.candidate for trial in self.result.trials if trial.samples)

    def knows(self, trial: Trial, now: Search) -> bool:
        """Say whether what it found of a candidate holds for another search, too."""
        template = trial.candidate.template
        return self.setting == now.setting and self.templates.get(template) == now.templates.get(template) and is_settled(trial)


_NO_SEARCH = Search(TuneResult("", {}), frozenset(), {}, "", "")
"""Stands for one that is compared with none."""


def is_settled(trial: Trial) -> bool:
    """Say whether a trial says what its candidate is worth, or why it is worth nothing."""
    return (
        bool(trial.samples)
        or trial.error is not None
        or (bool(trial.failure) and not trial.failure.startswith(_NOT_REPEATED) and not is_by_machine(trial))
    )


def is_open(trial: Trial) -> bool:
    """Say whether a trial ended without a finding on its candidate: it was not measured, or the machine has failed."""
    return not trial.samples and trial.error is None and (not trial.failure or is_by_machine(trial))


def is_by_machine(trial: Trial) -> bool:
    """Say whether the machine, and not the candidate, is to blame for a failure."""
    return failures.is_by_machine(trial.failure)


def judged(trial: Trial, tolerance: float, *, is_same_reference: bool) -> Trial | None:
    """Return what a trial says by the tolerance and the reference of now; None where it has to be measured.

    A time holds whatever the reference; it has no error then, and must be verified before it wins.
    """
    if trial.error is None:
        return trial
    if not is_same_reference:
        return replace(trial, error=None, failure="") if trial.samples else None
    if not trial.error <= tolerance:
        return excluded(trial, why_wrong(trial.error, tolerance))
    return replace(trial, failure="") if trial.samples else None


def _worth(trial: Trial) -> tuple[bool, bool]:
    return trial.error is not None, bool(trial.samples)


class Earlier:
    """The searches of which a store has records."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._searches: dict[frozenset[tuple[str, str]], list[Search]] = {}
        for record in records:
            subject, search = _parsed(record.manifest, TuneResult(record.key, record.result))
            self._searches.setdefault(subject, []).append(search)

    def of(self, manifest: str) -> Known:
        """Return what is known for the search that a manifest describes."""
        if not self._searches:
            return Known(_NO_SEARCH, ())
        subject, now = _parsed(manifest, TuneResult("", {}))
        return Known(now, tuple(self._searches.get(subject, ())))


@dataclass(frozen=True)
class Known:
    """What earlier searches of one computation on one device know for another one."""

    now: Search
    searches: tuple[Search, ...]

    def trials(self, tolerance: float) -> dict[Candidate, Trial]:
        """Return what holds now of candidates; a verdict by the reference of now goes before a time without one, and that before none."""
        found: dict[Candidate, Trial] = {}
        for search in self.searches:
            is_same_reference = search.reference == self.now.reference
            for trial in (trial for trial in search.result.trials if search.knows(trial, self.now)):
                own = trial if search.names == self.now.names else replace(trial, code_digest="")
                now = judged(own, tolerance, is_same_reference=is_same_reference)
                if now and (trial.candidate not in found or _worth(now) > _worth(found[trial.candidate])):
                    found[trial.candidate] = now
        return found

    @property
    def built(self) -> list[Trial]:
        """Trials whose code is known from their schedule, though they were made by other templates."""
        alike = [search for search in self.searches if search.setting == self.now.setting and search.names == self.now.names]
        return [trial for search in alike for trial in search.result.trials if trial.schedule_digest and trial.code_digest]

    @property
    def is_of_other_code(self) -> bool:
        """Whether any was made by other templates or tools: of those, the same code may have been measured."""
        return any(search.setting != self.now.setting or search.templates.items() - self.now.templates.items() for search in self.searches)

    def source(self, trial: Trial) -> TuneResult | None:
        """Return the record of the search that has timed a candidate."""
        return next((s.result for s in self.searches if s.knows(trial, self.now) and trial.candidate in s.timed), None)

    def winner(self, trial: Trial) -> TuneResult | None:
        """Return the record where this very kernel has won, if there is one: it names the blobs."""
        alike = (search for search in self.searches if search.names == self.now.names)
        return next((s.result for s in alike if s.result.winner == trial.candidate and s.knows(trial, self.now)), None)


def _parsed(manifest: str, result: TuneResult) -> tuple[frozenset[tuple[str, str]], Search]:
    """Return what a tuning was of, and the rest of its manifest."""
    lines = lines_of(manifest)
    subject = frozenset((name, lines.get(name, "")) for name in _SUBJECT)
    templates = {name.removeprefix("templates."): value for name, value in lines.items() if name.startswith("templates.")}
    rest = frozenset(line for line in lines.items() if not line[0].startswith(("templates.", "candidates.", "search.", "names")))
    return subject, Search(result, rest, templates, lines.get("search.reference", ""), lines.get("names", ""))
