"""Owns the attributes of one rule as read from TOML: types, defaults, checks, and the sentences about wrong values.

Knows nothing of tables, expansion or line numbers. Pydantic validates what is not plainly right (`plain_types`); its errors are
reworded here.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Len, Lt

from kerneldecl.declare.plain_types import Check, plainly_is
from kerneldecl.declare.sizes import LEAST_FLOAT, MOST_FLOAT, is_countable, is_float32
from kerneldecl.diagnostics.messages import rewritten, show, unknown
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.model import Value, frozen
from kerneldecl.plugins.check import attribute_fields
from kerneldecl.plugins.find import displayed, plugin_file
from kerneldecl.plugins.load import blamed, load_rule
from kerneldecl.rule import Rule, WorkspaceFile

_EXACT = 1 << 53
"""Whole numbers up to this one are floats, too."""
_MOST_PLACES = 5
"""Mistakes within one value that are told."""
_SCALARS = frozenset({int, str, float, bool})


@dataclasses.dataclass(frozen=True)
class Attribute:
    """One attribute of a rule."""

    name: str
    hint: Any
    """Type as the rule annotates it, aliases resolved."""
    is_required: bool
    default: Value | None
    """Default value; None where the attribute is required."""

    @cached_property
    def depth(self) -> int:
        """Return the levels of lists in one value: 0 for a scalar. A list nested deeper is a list of values."""
        return _depth(self.hint)

    @cached_property
    def is_plainly_right(self) -> Check:
        return plainly_is(self.hint) or (lambda _: False)

    @cached_property
    def is_float(self) -> bool:
        return _unwrapped(self.hint)[0] is float

    @cached_property
    def validate(self) -> Callable[[Value], Value]:
        """Return pydantic's judge of any value of any type; importing it takes a tenth of a second."""
        from pydantic import ConfigDict, TypeAdapter

        return TypeAdapter(self.hint, config=ConfigDict(strict=True, allow_inf_nan=False)).validator.validate_python

    @cached_property
    def is_file(self) -> bool:
        """Return whether its strings are paths in the workspace."""
        return _mentions(self.hint, WorkspaceFile)

    def read(self, value: Any) -> tuple[Value, tuple[tuple[str, str], ...]]:
        """Return the validated value and no mistakes, or an arbitrary value and (sentence, hint) of each mistake."""
        try:
            plain = value if type(value) in _SCALARS else frozen(value)
        except TypeError:
            return "", ((f"{self.name} is {show(value)}; expected {expected(self.hint)}", ""),)
        if not is_countable(plain):
            return "", ((f"{self.name} is {show(value)}; expected whole numbers of at most 64 bits", ""),)
        if type(plain) is int and self.is_float and abs(plain) <= _EXACT:
            plain = float(plain)
        if not is_float32(plain):
            numbers = f"numbers of float32: 0, or {LEAST_FLOAT:.2g} to {MOST_FLOAT:.2g} in magnitude"
            return "", ((f"{self.name} is {show(value)}; expected {numbers}", ""),)
        if self.is_plainly_right(plain):
            return plain, ()
        from pydantic import ValidationError

        try:
            return self.validate(plain), ()
        except ValidationError as error:
            # Of a long list, whose items are all wrong, the first ones tell.
            places = [] if _has_union(self.hint) else [tuple(item["loc"]) for item in error.errors(include_url=False)[:_MOST_PLACES]]
            return "", tuple(_mistake(self.name, self.hint, plain, place) for place in places or [()])


@dataclasses.dataclass(frozen=True)
class RuleAttributes:
    """A rule with its attributes by name, in the order of the class."""

    name: str
    rule: type[Rule]
    file: Path
    attributes: Mapping[str, Attribute]

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(name for name, attribute in self.attributes.items() if attribute.is_required)

    @cached_property
    def has_files(self) -> bool:
        """Return whether what it computes depends on files, which nobody reads before it is lowered."""
        return any(attribute.is_file for attribute in self.attributes.values())

    @cached_property
    def depths(self) -> Mapping[str, int]:
        return {name: attribute.depth for name, attribute in self.attributes.items()}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.attributes))

    def values(self, instance: Rule) -> tuple[Value, ...]:
        """Return an instance's attributes in order of their names."""
        return tuple(map(instance.__getattribute__, self.names))


def rule_attributes(root: Path, name: str) -> RuleAttributes:
    """Load a rule and read its attributes; raise DeclarationError where the file or the class is wrong."""
    rule, file = load_rule(root, name), plugin_file("rules", root, name)
    with blamed(file, root, f"attributes of rule {name} cannot be read"):
        hints = get_type_hints(rule, include_extras=True)
        attributes = attributes_of(rule, hints)
    sentences = [sentence for attribute in attributes.values() for sentence in _defects(attribute, name)]
    if sentences:
        raise DeclarationError(Problem(displayed(file, root), sentence) for sentence in sentences)
    return RuleAttributes(name, rule, file, attributes)


def attributes_of(dataclass: Any, hints: Mapping[str, Any]) -> dict[str, Attribute]:
    """Return the fields of a dataclass as attributes, in order of the class."""
    return {field.name: _attribute(field, hints[field.name]) for field in attribute_fields(dataclass)}


def expected(hint: Any) -> str:
    """Return what a type accepts, as part of a sentence."""
    if choices := literals(hint):
        return f"one of {', '.join(map(_bare, choices))}" if len(choices) > 1 else _bare(choices[0])
    base, limits = _unwrapped(hint)
    if base is WorkspaceFile:
        return "a path, relative to the workspace"
    if _is_union(base):
        return " or ".join(expected(member) for member in get_args(base))
    if get_origin(base) is tuple or base is tuple:
        return _expected_tuple(get_args(base), limits)
    nouns = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
    return " ".join([nouns.get(base, getattr(base, "__name__", str(base))), *limits])


def literals(hint: Any) -> tuple[Any, ...]:
    """Return the values of a type of literals, without the empty string, which means the default; () for any other type."""
    base, _ = _unwrapped(hint)
    if get_origin(base) is Literal:
        return tuple(value for value in get_args(base) if value != "")
    if not _is_union(base):
        return ()
    members = get_args(base)
    if not all(get_origin(_unwrapped(member)[0]) is Literal for member in members):
        return ()
    return tuple(dict.fromkeys(value for member in members for value in literals(member)))


def _defects(attribute: Attribute, rule: str) -> Iterator[str]:
    """Yield why TOML cannot hold an attribute."""
    where = f"attribute {attribute.name} of rule {rule}"
    if not _is_value(attribute.hint):
        name = getattr(attribute.hint, "__name__", str(attribute.hint))
        yield f"{where} has the type {name}; expected int, float, bool, str, Literal, or a tuple or union of them"
    elif not attribute.is_required and attribute.default is None:
        yield f"{where} has a default that TOML cannot hold; expected a string, a number, a boolean or a tuple"


def _is_value(hint: Any) -> bool:
    """Return whether a type's values are a Value of the model."""
    base, _ = _unwrapped(hint)
    if isinstance(base, NewType):
        return _is_value(base.__supertype__)
    if _is_union(base) or get_origin(base) is tuple:
        return all(_is_value(arg) for arg in get_args(base) if arg is not Ellipsis)
    return get_origin(base) is Literal or base in {bool, int, float, str, tuple}


def _attribute(field: dataclasses.Field[Any], hint: Any) -> Attribute:
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        return Attribute(field.name, hint, is_required=True, default=None)
    try:
        return Attribute(field.name, hint, is_required=False, default=frozen(default))
    except TypeError:
        return Attribute(field.name, hint, is_required=False, default=None)


def _mistake(name: str, hint: Any, value: Value, place: tuple[Any, ...]) -> tuple[str, str]:
    """Return sentence and hint about a place (positions of nested tuples) within a value."""
    where = name
    for position in place:
        if not isinstance(position, int) or not isinstance(value, tuple) or position >= len(value):
            break
        where, value, hint = f"{where}[{position}]", value[position], _item(hint, position)
    choices = literals(hint)
    if choices and isinstance(value, str):
        return unknown(name, value, map(str, choices))
    args = get_args(_unwrapped(hint)[0])
    if isinstance(value, tuple) and len(args) == 2 and args[1] is Ellipsis and (of_items := literals(args[0])):
        wrong = next(((at, item) for at, item in enumerate(value) if isinstance(item, str) and item not in of_items), None)
        if wrong:
            return unknown(f"{where}[{wrong[0]}]", wrong[1], map(str, of_items))
    return f"{where} is {show(value)}; expected {expected(hint)}", rewritten(value, expected(hint))


def _item(hint: Any, position: int) -> Any:
    args = get_args(_unwrapped(hint)[0])
    return args[0] if len(args) == 2 and args[1] is Ellipsis else args[position]


def _expected_tuple(args: tuple[Any, ...], limits: list[str]) -> str:
    if not args:
        return "a list"
    if len(args) == 2 and args[1] is Ellipsis:
        items = expected(args[0])
        if items.startswith("a list whose") and not limits:
            return f"a list of lists{items.removeprefix('a list')}"
        return " ".join(["a list", *limits, "whose items are each", items])
    each = list(map(expected, args))
    items = f"items that are each {each[0]}" if len(set(each)) == 1 else f"items: {', '.join(each)}"
    return f"a list of {len(args)} {items}"


def _bare(choice: object) -> str:
    return choice if isinstance(choice, str) else show(choice)


def _unwrapped(hint: Any) -> tuple[Any, list[str]]:
    """Return a type without its annotations, and the annotations as parts of a sentence."""
    if get_origin(hint) is not Annotated:
        return hint, []
    base, *constraints = get_args(hint)
    return base, list(_limits(constraints))


def _limits(constraints: list[Any]) -> Iterator[str]:
    relations = {Gt: ("gt", "above"), Ge: ("ge", "of at least"), Lt: ("lt", "below"), Le: ("le", "of at most")}
    for constraint in constraints:
        if type(constraint) in relations:
            name, relation = relations[type(constraint)]
            yield f"{relation} {getattr(constraint, name)}"
        elif isinstance(constraint, Len):
            most = f" and at most {constraint.max_length}" if constraint.max_length is not None else ""
            yield f"of at least {constraint.min_length}{most} items"


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in {Union, types.UnionType}


def _has_union(hint: Any) -> bool:
    base, _ = _unwrapped(hint)
    return _is_union(base) or (get_origin(base) is tuple and any(_has_union(arg) for arg in get_args(base)))


def _depth(hint: Any) -> int:
    base, _ = _unwrapped(hint)
    if get_origin(base) is tuple or base is tuple:
        return 1 + max((_depth(arg) for arg in get_args(base) if arg is not Ellipsis), default=0)
    return max(map(_depth, get_args(base)), default=0) if _is_union(base) else 0


def _mentions(hint: Any, wanted: Any) -> bool:
    return hint is wanted or any(_mentions(arg, wanted) for arg in get_args(hint))
