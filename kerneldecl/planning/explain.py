"""Owns the words for lines of manifests that differ: which file or key they come from, and what of it changed.

Knows nothing of how a plan is made. A digest in a manifest is named by what `planning/sources` knows to be behind it; one that an action
has produced (a computation, a list of candidates) by what differs for that action.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kerneldecl.limits import BUDGET, SHARED_SECONDS
from kerneldecl.model import SPECIALIZE, Arch, Workload, uses
from kerneldecl.planning.action import Kind
from kerneldecl.planning.causes import Cause
from kerneldecl.planning.plan import Before, EntryPlan, Inputs, Manifests, link_parts
from kerneldecl.planning.sources import Parts, Sources
from kerneldecl.store.keys import changed_lines
from kerneldecl.timing import timing_of

DECLARED = "workloads.toml"
ONLY_CHECKED = frozenset({"reference"})
"""Methods of rules that only verification depends on."""
NOT_CHECKED = frozenset({"lower", "flops", "least_bytes", "tolerance", "problems"})
"""Methods that verification does not depend on."""
_OTHER_FILE = "itself or a file that it imports"
Line = tuple[str, str | None, str | None]
"""Name, old and new value of a manifest's line."""


@dataclass(frozen=True)
class Explainer:
    """Explains what is not as it was in the last build."""

    inputs: Inputs
    before: Before
    verified_by: Callable[[str], str]
    """The digest of what an entry's inputs and reference came from in the last build; empty where that is unknown."""
    earlier: Callable[[], Sources]
    """What was behind digests in the last build."""
    now: Callable[[str], Sources]
    """What is behind a digest of now."""

    def causes(self, workload: Workload, kind: Kind, manifests: Manifests) -> tuple[Cause, ...]:
        """Return why an action's manifest, of those by kind, is not the last build's; nothing where there was none."""
        return tuple(dict.fromkeys(self._causes(workload, kind, manifests)))

    def _causes(self, workload: Workload, kind: Kind, manifests: Manifests) -> Iterator[Cause]:
        new = manifests[kind]
        old = self.before(workload.entry, kind, new)
        lines = changed_lines(old, new) if old else []
        names = {line[0] for line in lines}
        for line in lines:
            # A template that only one of two lists names is no cause, but comes with the list.
            if not (line[0].startswith("templates.") and None in line and any(name.startswith("candidates.") for name in names)):
                yield from self._cause(workload, line, manifests)

    def _cause(self, workload: Workload, line: Line, manifests: Manifests) -> Iterator[Cause]:
        name, old, new = line
        head, _, rest = name.partition(".")
        if head == "rule":
            yield from self._described(old, new, ONLY_CHECKED)
        elif head in {"policies", "templates"} and old and new:
            yield from self._described(old, new)
        elif head in {"computation", "names"}:
            yield from list(self._causes(workload, "lower", manifests)) or [Cause("computation", "another one")]
        elif head == "candidates":
            yield from self._causes(workload, "propose", manifests)
            yield _of_candidates(rest.partition(".")[2], old, new)
        elif name == "search.reference":
            yield from self._of_reference(workload, manifests)
        elif name == "search.protocol":
            yield _of_timing(self.inputs.archs[workload.target], line)
        else:
            yield _stated(workload, self.inputs.archs[workload.target], line)

    def _of_reference(self, workload: Workload, manifests: Manifests) -> Iterator[Cause]:
        """Yield what verdicts depend on and is not as it was: the rule's reference, or what its attributes say."""
        old, new = self.verified_by(workload.entry), self.inputs.references[workload.rule]
        found = list(self._described(f'"{old}"', f'"{new}"', NOT_CHECKED)) if old and old != new else []
        before = self.before(workload.entry, "lower", manifests["lower"])
        lines = changed_lines(before, manifests["lower"]) if before else []
        for line in lines:
            found += self._cause(workload, line, manifests) if line[0].startswith(("attrs.", "files.")) else ()
        yield from found or [Cause(f"rules/{workload.rule}.py", "reference or inputs, itself or a file that it imports")]

    def _described(self, old: str | None, new: str | None, without: frozenset[str] = frozenset()) -> Iterator[Cause]:
        """Yield what differs behind two digests of plug-ins, as manifests write them, methods in `without` only where nothing else does."""
        before, after = ((value or "").strip('"') for value in (old, new))
        earlier, now = self.earlier(), self.now(after)
        current = now.digests.get(after, {})
        own = next(iter(current), "a plug-in")
        if before not in earlier.digests:
            yield Cause(own, _OTHER_FILE)
            return
        found = list(_differences(earlier.digests[before], current, earlier.files, now.files))
        counted = [cause for cause in found if cause.what.rpartition(".")[2] not in without]
        yield from counted or found or [Cause(own, _OTHER_FILE)]


def link_causes(target: str, lines: Sequence[Line], entries: Mapping[str, EntryPlan], earlier: Parts) -> tuple[Cause, ...]:
    """Return why a target is linked again, given the lines of its manifest that differ.

    `entries` are those of it that are tuned, by name; `earlier` the parts of what the artifact held of each.
    """
    gone = {line[1]: line[0] for line in lines if line[2] is None}
    renamed = {gone[line[2]] for line in lines if line[1] is None and line[2] in gone}
    return tuple(_link_cause(target, line, gone, entries, earlier) for line in lines if line[0] not in renamed)


def _link_cause(target: str, line: Line, gone: Mapping[str | None, str], entries: Mapping[str, EntryPlan], earlier: Parts) -> Cause:
    name, old, new = line
    head, _, entry = name.partition(".")
    if head == "artifact":
        return Cause(DECLARED, name, old, new)
    if head == "missing":
        return Cause(f"entry {entry}", "has failed" if new else "failed before")
    if old is None:
        return Cause(f"entry {entry}", f"was {gone[new].partition('.')[2]}" if new in gone else "is new")
    if new is None:
        return Cause(f"entry {entry}", "is gone")
    before = earlier.get(f"{entry}@{target}", {})
    now = link_parts(entries[entry]) if entry in entries else {}
    differing = [part for part in now if before and before.get(part) != now[part]]
    return Cause(f"entry {entry}", ", ".join(differing) or "another kernel, or what is said of it")


_LIMITS = frozenset(f"search.budget.{name}" for name in (*BUDGET, SHARED_SECONDS))
_DECLARED = _LIMITS | {"search.tolerance", "search.generation", "search.turns", "nan", "top_k", "asked", "generation"}
"""Lines of manifests that stand in workloads.toml as they are."""


def _of_candidates(policy: str, old: str | None, new: str | None) -> Cause:
    """Return what changed of what a policy proposes, of which manifests hold count and digest, or of a tuner's options."""
    options = [None if value is None else json.loads(value) for value in (old, new)]
    if any(each and each.startswith("{") for each in options):  # of a tuner that is asked again
        return Cause(DECLARED, f"options of {policy}", *options)
    counts = [None if value is None else value.strip('"').partition(" ")[0] for value in (old, new)]
    if counts[0] == counts[1]:
        return Cause("candidates", f"others of {policy}, as many")
    return Cause("candidates", f"of {policy}", *counts)


def _of_timing(arch: Arch, line: Line) -> Cause:
    """Return what changed of how winners are chosen: what is declared, or what a timing is in another version."""
    name, old, new = line
    timings = [value and timing_of(arch.kind, value.strip('"')) for value in (old, new)]
    is_declared = all(timings) and timings[0] != timings[1]
    return Cause(DECLARED, "timing", *timings) if is_declared else Cause("kerneldecl", name, old, new)


def _stated(workload: Workload, arch: Arch, line: Line) -> Cause:
    """Return what a line says that stands somewhere as it is: where, its name there, and its values."""
    name, old, new = line
    head, _, rest = name.partition(".")
    if head == "files":
        return Cause(str(dict(workload.attrs).get(rest, rest)), "its content")
    if head == "policies":
        asking = ", ".join(use.name for use in uses(workload.policy))
        return Cause(f"policies of {asking}", f"{rest} is asked" if new else f"{rest} is asked no more")
    if name == f"templates.{SPECIALIZE}":
        return Cause(DECLARED, SPECIALIZE, *(None if value is None else "there" for value in (old, new)))
    if head == "attrs" or name in _DECLARED:
        return Cause(DECLARED, rest or name, old, new)
    if head == "arch":
        return Cause("this machine" if arch.is_detected else f"archs/{arch.name}.toml", rest, old, new)
    return Cause("toolchain", rest, old, new) if head == "toolchain" else Cause("kerneldecl", name, old, new)


def _differences(before: Mapping[str, str], after: Mapping[str, str], old: Parts, new: Parts) -> Iterator[Cause]:
    """Yield what differs between the files of two plug-ins, given the definitions of each file by its digest."""
    own_before, own_after = next(iter(before), ""), next(iter(after), "")
    if own_before != own_after:
        yield Cause(own_after, f"instead of {own_before}")
        return
    for name in (*after, *(name for name in before if name not in after)):
        if before.get(name) != after.get(name):
            yield from _parts(name, old.get(before.get(name, "")), new.get(after.get(name, "")))


def _parts(name: str, old: Mapping[str, str] | None, new: Mapping[str, str] | None) -> Iterator[Cause]:
    if old is None or new is None:
        yield Cause(name, "a file that is imported no more" if new is None else "a file that was not imported")
        return
    differing = [part for part in (*new, *(part for part in old if part not in new)) if old.get(part) != new.get(part)]
    yield from (Cause(name, part) for part in differing or ["its text"])
