"""Owns what the keys `policy`, `dispatch` and `budget` of workloads.toml become: a TOML value of the right form as the model holds it.

Knows nothing of which policies there are, or of which options they take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kerneldecl.limits import Budget
from kerneldecl.model import Options, Policy, Value, frozen, uses

Item = str | Mapping[str, Any]
DISPATCHES = ("tuned", "library", "fastest")
"""The values of `dispatch`, the default first."""
LIBRARY = "library"
"""The policy that proposes calls of vendors' libraries."""


def items_of(value: Any) -> Sequence[Item]:
    """Return the items of a value of the right form."""
    return value if isinstance(value, list) else [value]


def name_of(item: Item) -> str:
    return item if isinstance(item, str) else str(item["name"])


def policy_of(value: Any) -> Policy:
    """Return what a checked value declares: a name alone as it is."""
    items = tuple(item if isinstance(item, str) else _declared(item) for item in items_of(value))
    return items[0] if len(items) == 1 and isinstance(items[0], str) else items


def dispatched(policy: Policy, dispatch: str) -> Policy:
    """Return the policies that an entry asks: its own, the library's alone, or both, of which the fastest wins."""
    if dispatch == "library":
        return next(((item,) for item in _items(policy) if _name(item) == LIBRARY), LIBRARY)  # with its options
    if dispatch == "fastest" and LIBRARY not in map(_name, _items(policy)):
        return (*_items(policy), LIBRARY)
    return policy


def _items(policy: Policy) -> tuple[str | tuple[str, Options], ...]:
    return (policy,) if isinstance(policy, str) else policy


def _name(item: str | tuple[str, Options]) -> str:
    return item if isinstance(item, str) else item[0]


def _declared(item: Mapping[str, Any]) -> str | tuple[str, Options]:
    options = tuple(sorted((name, frozen_value(value)) for name, value in item.items() if name != "name"))
    return (str(item["name"]), options) if options else str(item["name"])


def key_of(policy: Policy) -> tuple[str, ...]:
    """Return the attributes by which an entry's configurations are keyed; none where each entry has its own winner."""
    keys = (dict(use.options).get("key", ()) for use in uses(policy))
    return next((tuple(map(str, key)) for key in keys if isinstance(key, tuple) and key), ())


def budget_of(table: Mapping[str, Any]) -> Budget:
    """Return a checked budget."""
    return tuple(sorted((name, float(value)) for name, value in table.items()))


def frozen_value(value: Any) -> Value:
    """Return a TOML value as an option holds it: a table becomes its pairs, sorted by name."""
    if isinstance(value, dict):
        return tuple((name, frozen_value(item)) for name, item in sorted(value.items()))
    return tuple(map(frozen_value, value)) if isinstance(value, list) else frozen(value)
