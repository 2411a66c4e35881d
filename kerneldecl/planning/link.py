"""Owns the action that links one target, given the digests of its entries.

Knows nothing of how entries are planned, of files, or of what an artifact holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kerneldecl.planning.action import Action, Difference, Subject
from kerneldecl.store import keys


class ArtifactOf(NamedTuple):
    """What is declared of a workspace's artifacts."""

    name: str
    version: str
    has_headers: bool = False
    """Whether they carry kernels as headers."""


class LinkPast(NamedTuple):
    """What earlier builds left of one target."""

    defect: Callable[[str], str]
    """What is wrong with the artifact for a link key; empty where nothing is."""
    difference: Callable[[str], Difference]
    """What is not as in the last build, given the link's manifest."""


def link_action(
    artifact: ArtifactOf,
    target: str,
    digests: Mapping[str, str],
    waiting: Sequence[str],
    past: LinkPast,
    missing: Mapping[str, str] = MappingProxyType({}),
) -> Action:
    """Return the link of one target; `waiting` are its entries that are not tuned yet.

    `missing` gives the reasons why entries have failed, which the artifact is linked without.
    """
    subject = Subject(target, target, "link")
    if waiting:
        return Action.waiting(subject, f"{len(waiting)} entries" if len(waiting) > 1 else str(waiting[0]))
    manifest = keys.link_manifest(artifact.name, artifact.version, target, digests, missing, has_headers=artifact.has_headers)
    link_key = keys.key(manifest)
    if not (reason := past.defect(link_key)):
        return Action.done(subject, link_key, manifest)
    difference = past.difference(manifest)
    return Action.ready(subject, link_key, str(difference) or reason, manifest, difference)
