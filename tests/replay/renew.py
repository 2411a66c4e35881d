"""Owns renewing the frozen files: it shows how they differ from what is now right, and writes that unless --show is given.

Knows nothing of pytest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]  # this checkout before any that is installed

from replay import frozen, replay  # noqa: E402
from replay.difference import difference, report, space_difference  # noqa: E402
from replay.workloads import Workload, read_workloads  # noqa: E402

MOST_RENAMED = 5
"""Parameters of a template that are matched by the values that they have."""


def archs_of(workloads: Iterable[Workload]) -> list[str]:
    return list(dict.fromkeys(arch for each in workloads for arch in each.archs))


def with_renamed(names: frozen.Names, found: Iterable[replay.Proposals], known: frozen.Lists) -> frozen.Names:
    """Return names in which parameters that are called otherwise by now keep their places.

    Where as many names of a template's parameters are gone as are new, they are matched so that most candidates are known ones.
    """
    candidates: dict[str, list[dict[str, Any]]] = {}
    for one in (one for proposals in found for several in proposals.values() for one in several):
        candidates.setdefault(names.frozen_template(one.template), []).append(one.params)
    texts = {line.candidate for lines in known.values() for line in lines}
    parameters = dict(names.parameters)
    for template, several in candidates.items():
        old, new = parameters.get(template, ()), {name for params in several for name in params}
        gone, come = [name for name in old if name not in new], sorted(new - set(old))
        if gone and len(gone) == len(come) <= MOST_RENAMED:
            orders = (_put(old, dict(zip(gone, order, strict=True))) for order in itertools.permutations(come))
            parameters[template] = max(orders, key=lambda order: _known(names, template, order, several, texts))
    return frozen.Names(names.policies, names.templates, parameters)


def _put(order: Iterable[str], instead: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(instead.get(name, name) for name in order)


def _known(names: frozen.Names, template: str, order: tuple[str, ...], several: list[dict[str, Any]], texts: set[str]) -> int:
    tried = frozen.Names(names.policies, names.templates, {template: order})
    return sum(tried.text_of(names.templates.get(template, template), params) in texts for params in several)


def names_difference(old: frozen.Names, new: frozen.Names) -> Iterator[str]:
    for template, order in new.parameters.items():
        before = old.parameters.get(template, ())
        renamed = [(was, now) for was, now in zip(before, order, strict=False) if was != now]
        yield from (f"{template}: parameter {was} is now called {now}" for was, now in renamed)
        yield from (f"{template}: new parameter {name}" for name in order[len(before) :])
    for what, one, other in (("policy", old.policies, new.policies), ("template", old.templates, new.templates)):
        yield from (f"{what} {name} occurs no more" for name in one.keys() - other.keys())
        yield from (f"{what} {name} is new" for name in other.keys() - one.keys())


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
