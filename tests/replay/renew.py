"""Owns renewing the frozen files: it shows how they differ from what is now right, and writes that unless --show is given.

Knows nothing of pytest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]  # this checkout before any that is installed

from replay import frozen, replay  # noqa: E402
from replay.difference import difference, report, space_difference  # noqa: E402
from replay.renaming import names_difference, with_renamed  # noqa: E402
from replay.workloads import Workload, read_workloads  # noqa: E402


def archs_of(workloads: Iterable[Workload]) -> list[str]:
    return list(dict.fromkeys(arch for each in workloads for arch in each.archs))


def used(found: Mapping[str, replay.Proposals]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the policies that proposed something, and the templates with their parameters."""
    policies: dict[str, None] = {}
    templates: dict[str, dict[str, None]] = {}
    for (_, policy), several in (pair for proposals in found.values() for pair in proposals.items()):
        for one in several:
            policies[policy] = None
            templates.setdefault(one.template, {}).update(dict.fromkeys(one.params))
    return list(policies), {name: list(words) for name, words in templates.items()}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n" if text else "")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="write nothing")
    is_writing = not parser.parse_args().show
    workloads = read_workloads()
    archs = archs_of(workloads)
    spaces = json.loads(json.dumps(replay.spaces(workloads)))
    say(space_difference(frozen.read_spaces(), spaces))
    found = {arch: replay.proposals(workloads, arch, spaces) for arch in archs}

    old_names = frozen.read_names()
    old = {arch: frozen.read_lists("proposals", arch) for arch in archs}
    names = with_renamed(old_names, found.values(), {(arch, *key): lines for arch in archs for key, lines in old[arch].items()})
    names = frozen.with_places(names, *used(found))
    say("\n".join(names_difference(old_names, names)))
    lists = {arch: replay.proposal_lists(found[arch], arch, names) for arch in archs}
    show("proposals", old, lists, names)

    chosen = replay.chosen(workloads, lists, archs)
    schedules = {arch: replay.digests(workloads, arch, chosen[arch], names) for arch in archs}
    show("schedules", {arch: frozen.read_lists("schedules", arch) for arch in archs}, schedules, names)
    if is_writing:
        frozen.write_spaces(spaces)
        frozen.write_names(names)
        for arch in archs:
            frozen.write_lists("proposals", arch, lists[arch])
            frozen.write_lists("schedules", arch, schedules[arch])


def show(kind: str, old: Mapping[str, frozen.Lists], new: Mapping[str, frozen.Lists], names: frozen.Names) -> None:
    lines: list[str] = []
    counted: Counter[str] = Counter()
    for arch in new:
        more, counts = difference(old[arch], new[arch], names, arch)
        lines += more
        counted += counts
    candidates = sum(len(several) for lists in new.values() for several in lists.values())
    say(report(lines, counted, sum(map(len, new.values()))) or f"no difference in {kind}: {candidates} candidates")


if __name__ == "__main__":
    main()
