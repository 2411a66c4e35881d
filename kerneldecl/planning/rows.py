"""Owns the plan of kernels of any number of rows: for which numbers they are tuned, and whether the choice among them is made, by its key.

Knows nothing of how kernels are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kerneldecl.model import Workload
from kerneldecl.planning.action import Action, Subject
from kerneldecl.rows import chosen_numbers
from kerneldecl.store import keys
from kerneldecl.store.local import Record
from kerneldecl.timing import measuring

if TYPE_CHECKING:
    from kerneldecl.planning.plan import EntryPlan, Read

Ranges = tuple[tuple[int, int], ...]
"""Numbers of rows, ascending, each with that which the kernel is tuned for that takes so many and fewer."""
ReferenceOf = Callable[[Workload], str]
"""Gives the digest of what verdicts on a workload's kernels depend on."""


def without_spare(entries: tuple[EntryPlan, ...]) -> tuple[EntryPlan, ...]:
    """Return the entries without those of numbers of rows beside the declared ones that predicted times say are not worth a kernel.

    That is known once policies have proposed for the declared ones; those stay for which they have not proposed yet.
    """
    spare: set[str] = set()
    for members in _by_kernel(entries).values():
        rows, declared = members[0].workload.rows, [entry for entry in members if not _is_between(entry)]
        if rows and all(entry.groups for entry in declared):
            predicted = {_rows_of(entry): secs for entry in members if (secs := _predicted_secs(entry))}
            kept = chosen_numbers(rows.tuned, rows.upto, predicted)
            spare |= {entry.entry for entry in members if entry.groups and _is_between(entry) and _rows_of(entry) not in kept}
    return tuple(entry for entry in entries if entry.entry not in spare) if spare else entries


def _by_kernel(entries: Sequence[EntryPlan]) -> dict[tuple[str, str], list[EntryPlan]]:
    """Return the entries of each kernel of any number of rows, by its target and name."""
    several: dict[tuple[str, str], list[EntryPlan]] = {}
    for entry in entries:
        if entry.workload.rows:
            several.setdefault((entry.workload.target, entry.workload.rows.name), []).append(entry)
    return several


def _is_between(entry: EntryPlan) -> bool:
    return entry.workload.rows is not None and entry.workload.rows.is_between(dict(entry.workload.attrs))


def _rows_of(entry: EntryPlan) -> int:
    assert entry.workload.rows is not None, "these have rows"
    return entry.workload.rows.of(dict(entry.workload.attrs))


def _predicted_secs(entry: EntryPlan) -> float:
    """Return the least time that is predicted of a candidate; 0 where none is."""
    predicted = (proposal.predicted_secs for group in entry.groups for proposal in group.proposals)
    return min((secs for secs in predicted if 0 < secs < math.inf), default=0.0)


def with_rows(entries: tuple[EntryPlan, ...], reference_of: ReferenceOf, read: Read, failed: Collection[str] = ()) -> tuple[EntryPlan, ...]:
    """Return the entries with the choice among kernels of each number of rows that is known at run time, once all of them are tuned.

    `failed` are entries that have no kernel: those of numbers between the declared ones are done without.
    """
    several = _by_kernel([entry for entry in entries if not (entry.entry in failed and _is_between(entry))])
    planned = {entry.entry: entry for members in several.values() for entry in _chosen(members, reference_of, read)}
    return tuple(planned.get(entry.entry, entry) for entry in entries) if planned else entries


def is_called(entry: EntryPlan) -> bool:
    """Say whether calls reach an entry's kernel: that for a number of rows between the declared ones may have found no range."""
    return not (entry.ranges and _is_between(entry)) or _rows_of(entry) in {tuned for _, tuned in entry.ranges}


def _chosen(members: Sequence[EntryPlan], reference_of: ReferenceOf, read: Read) -> list[EntryPlan]:
    """Return the entries of one kernel of any number of rows with the action that chooses among them."""
    last, rows = members[-1], members[-1].workload.rows
    assert rows is not None, "these have rows"
    subject = Subject(last.entry, last.workload.target, "rows")
    if not all(entry.tuned for entry in members):
        awaited = next(entry.entry for entry in members if not entry.tuned)
        return [replace(entry, actions=(*entry.actions, Action.waiting(subject, awaited))) for entry in members]
    objects = {_rows_of(entry): entry.tuned.build_key for entry in members if entry.tuned}
    search = {
        "protocol": measuring(last.arch.kind, last.workload.timing),
        "reference": reference_of(last.workload),
        "unmeasured": any(entry.is_unmeasured for entry in members),
    }
    manifest = keys.rows_manifest(objects, rows.upto, search, last.arch)
    key = keys.key(manifest)
    found = read("rows", key, last.arch.is_detected)
    found = found if isinstance(found, Record) else read("rows", key, True)  # chosen here, where nothing could be timed
    if not isinstance(found, Record):
        ready = Action.ready(subject, key, "its kernels were never compared at other numbers of rows", manifest)
        return [replace(entry, actions=(*entry.actions, ready)) for entry in members]
    ranges = tuple((int(upto), int(tuned)) for upto, tuned in found.result["ranges"])
    return [replace(entry, actions=(*entry.actions, Action.done(subject, key)), ranges=ranges) for entry in members]
