"""Owns what digests in manifests stand for: files and their definitions, kept from one build to the next so that a difference has a name.

Knows nothing of plans. Losing it loses names of what changed, never results; neither keys nor null builds read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerneldecl.plugins.definitions import definitions
from kerneldecl.plugins.meaning import meaning
from kerneldecl.store.files import write_whole
from kerneldecl.store.keys import digest
from kerneldecl.store.regular import read_file

FILE = "sources.json"
SCHEMA = 1
Named = tuple[tuple[str, Path], ...]
"""Files, each with the name that messages show."""
Parts = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Sources:
    """What was behind digests."""

    digests: Parts = field(default_factory=dict)
    """The digest of each file by its name, by the joint digest of a plug-in: the plug-in's own file first."""
    files: Parts = field(default_factory=dict)
    """The digest of each definition by its name, by a file's digest."""
    links: Parts = field(default_factory=dict)
    """Checksums of what an artifact says and holds of an entry, by entry."""

    def with_earlier(self, earlier: Sources) -> Sources:
        """Return these and those of an earlier build."""
        return Sources({**earlier.digests, **self.digests}, {**earlier.files, **self.files}, {**earlier.links, **self.links})


def sources_behind(behind: Mapping[str, Named], known: Sources) -> Sources:
    """Return what the digests stand for; files whose parts are `known` are not cut into parts again."""
    digests: dict[str, dict[str, str]] = {}
    files: dict[str, Mapping[str, str]] = {}
    for joint, named in behind.items():
        digests[joint] = {}
        for name, file in named:
            content = read_file(file)
            is_python = file.suffix == ".py"
            held = meaning(content).digest if is_python else digest(content)
            digests[joint][name] = held
            if held not in files:
                files[held] = known.files[held] if held in known.files else definitions(content) if is_python else {}
    return Sources(digests, files)


def read_sources(path: Path) -> Sources:
    """Return what the last build left; nothing where there is none or it is unreadable."""
    try:
        fields = json.loads(read_file(path))
        found = Sources(fields["digests"], fields["files"], fields["links"])
        return found if fields["schema"] == SCHEMA and all(map(_are_parts, (found.digests, found.files, found.links))) else Sources()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Sources()


def _are_parts(parts: Any) -> bool:
    return all({*map(type, found.values())} <= {str} for found in parts.values())


def write_sources(path: Path, sources: Sources) -> None:
    write_whole(path, json.dumps({"schema": SCHEMA, **vars(sources)}, separators=(",", ":")), durable=False)
