"""Owns how renamed parameters are found: by the values that candidates have under the new names.

Knows nothing of files or of who asks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from replay import frozen, replay

MOST_RENAMED = 5
"""Parameters of a template that are matched, which takes as many tries as they have orders."""


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
