"""Owns the quick judgement of attributes: whether a value is plainly of a type, for the types that most attributes have.

Knows nothing of mistakes. What is not plainly right is left to pydantic, which judges every type and is slow to import.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Len, Lt

Check = Callable[[Any], bool]
_RELATIONS: Mapping[type, tuple[str, Callable[[Any, Any], bool]]] = {
    Gt: ("gt", operator.gt),
    Ge: ("ge", operator.ge),
    Lt: ("lt", operator.lt),
    Le: ("le", operator.le),
}


def plainly_is(hint: Any) -> Check | None:
    """Return a function that says whether a frozen value is plainly of a type, with no conversion; None for other types."""
    if isinstance(hint, NewType):
        return plainly_is(hint.__supertype__)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _all_of([plainly_is(args[0]), *map(_limit, args[1:])])
    if origin in {Union, types.UnionType}:
        return _any_of([plainly_is(member) for member in args])
    return _tuple(args) if origin is tuple else _scalar(hint)


def _scalar(hint: Any) -> Check | None:
    if hint is float:
        return lambda value: type(value) is float and math.isfinite(value)
    if hint is bool or hint is int or hint is str:
        return lambda value: type(value) is hint
    if get_origin(hint) is Literal:
        choices = frozenset((type(choice), choice) for choice in get_args(hint))
        return lambda value: (type(value), value) in choices
    return None


def _limit(constraint: Any) -> Check | None:
    """Return the check of an annotation; None for one that is not known here."""
    if type(constraint) in _RELATIONS:
        name, relation = _RELATIONS[type(constraint)]
        bound = getattr(constraint, name)
        return lambda value: relation(value, bound)
    if isinstance(constraint, Len):
        least, most = constraint.min_length, constraint.max_length
        return lambda value: least <= len(value) and (most is None or len(value) <= most)
    return None


def _all_of(several: list[Check | None]) -> Check | None:
    checks = [check for check in several if check]
    return (lambda value: all(check(value) for check in checks)) if len(checks) == len(several) else None


def _any_of(several: list[Check | None]) -> Check | None:
    checks = [check for check in several if check]
    return (lambda value: any(check(value) for check in checks)) if len(checks) == len(several) else None


def _tuple(args: tuple[Any, ...]) -> Check | None:
    if len(args) == 2 and args[1] is Ellipsis:
        each = plainly_is(args[0])
        return (lambda value: type(value) is tuple and all(map(each, value))) if each else None
    items = [check for check in map(plainly_is, args) if check]
    if len(items) < len(args) or not args:
        return None
    return lambda value: type(value) is tuple and len(value) == len(items) and all(check(v) for check, v in zip(items, value, strict=True))
