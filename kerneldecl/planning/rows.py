"""Owns the plan of the choice among kernels by the number of rows of a call: its key, and whether it is made.

Knows nothing of how kernels are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kerneldecl.model import Workload
from kerneldecl.planning.action import Action, Subject
from kerneldecl.store import keys
from kerneldecl.store.local import Record
from kerneldecl.timing import measuring

if TYPE_CHECKING:
    from kerneldecl.planning.plan import EntryPlan, Read

Ranges = tuple[tuple[int, int], ...]
"""Numbers of rows, ascending, each with that which the kernel is tuned for that takes so many and fewer."""
ReferenceOf = Callable[[Workload], str]
"""Gives the digest of what verdicts on a workload's kernels depend on."""


def with_rows(entries: tuple[EntryPlan, ...], reference_of: ReferenceOf, read: Read, failed: Collection[str] = ()) -> tuple[EntryPlan, ...]:
    """Return the entries with the choice among kernels of each number of rows that is known at run time, once all of them are tuned.

    `failed` are entries that have no kernel: those of numbers between the declared ones are done without.
    """
    several: dict[tuple[str, str], list[EntryPlan]] = {}
    for entry in entries:
        if entry.workload.rows and not (entry.entry in failed and entry.workload.rows.is_between(dict(entry.workload.attrs))):
            several.setdefault((entry.workload.target, entry.workload.rows.name), []).append(entry)
    planned = {entry.entry: entry for members in several.values() for entry in _chosen(members, reference_of, read)}
    return tuple(planned.get(entry.entry, entry) for entry in entries) if planned else entries


def is_called(entry: EntryPlan) -> bool:
    """Say whether calls reach an entry's kernel: that for a number of rows between the declared ones may have found no range."""
    rows, attrs = entry.workload.rows, dict(entry.workload.attrs)
    if not (rows and entry.ranges and rows.is_between(attrs)):
        return True
    return rows.of(attrs) in {tuned for _, tuned in entry.ranges}


def _chosen(members: Sequence[EntryPlan], reference_of: ReferenceOf, read: Read) -> list[EntryPlan]:
    """Return the entries of one kernel of any number of rows with the action that chooses among them."""
    last, rows = members[-1], members[-1].workload.rows
    assert rows is not None, "these have rows"
    subject = Subject(last.entry, last.workload.target, "rows")
    if not all(entry.tuned for entry in members):
        awaited = next(entry.entry for entry in members if not entry.tuned)
        return [replace(entry, actions=(*entry.actions, Action.waiting(subject, awaited))) for entry in members]
    objects = {rows.of(dict(entry.workload.attrs)): entry.tuned.build_key for entry in members if entry.tuned}
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
