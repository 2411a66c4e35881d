"""Owns what there is to declare, as data: rules with their attributes and an entry to paste, policies, templates, archs.

Knows nothing of how it is shown. Policies and templates are read as text: listing them imports nothing of theirs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli

from kerneldecl.declare.attribute_notes import summaries
from kerneldecl.declare.operator_names import operator_names
from kerneldecl.declare.rule_attributes import RuleAttributes, attributes_of, expected, rule_attributes
from kerneldecl.errors import DeclarationError
from kerneldecl.model import Arch
from kerneldecl.plugins.find import HOST, Kind, plugin_file, plugin_names, shown_in
from kerneldecl.plugins.load import load_arch, load_module
from kerneldecl.plugins.policy_order import is_tuner, kinds_of, place_in_auto
from kerneldecl.signature import Signature

_EXAMPLES = Path(__file__).with_name("rule_examples.toml")


@dataclass(frozen=True)
class AttributePage:
    """One attribute of a rule, or one option of a tuner."""

    name: str
    accepts: str
    """What it may be, as part of a sentence."""
    default: str
    """As TOML has it; empty where it must be given."""
    summary: str


@dataclass(frozen=True)
class RulePage:
    """What a rule computes and takes, and an entry of it."""

    name: str
    file: str
    description: str
    attributes: tuple[AttributePage, ...]
    example: str
    """A `[[workload]]` table; where no example is known, with `…` for what must be given."""
    signature: Signature | None
    """The arguments of the example's kernel; None where its values are not known."""
    called: str = ""
    """What was asked for under another name, and how the rule computes it."""


@dataclass(frozen=True)
class PolicyPage:
    """What a policy proposes, for which machines."""

    name: str
    file: str
    description: str
    kinds: tuple[str, ...]
    """Kinds of arch that it is for; empty: it does not say."""
    auto: Mapping[str, int]
    """Its place in the order in which `auto` asks, by kind of arch; empty: `auto` does not ask it."""
    templates: tuple[str, ...]
    options: tuple[AttributePage, ...]
    """What a tuner takes besides a budget."""
    is_tuner: bool


@dataclass(frozen=True)
class TemplatePage:
    """What a template schedules, and its parameters as its description lists them."""

    name: str
    file: str
    description: str


def rule_page(root: Path, name: str) -> RulePage:
    """Return the page of one rule, also under another name that operators are known by; raise DeclarationError where there is none."""
    if name not in plugin_names("rules", root) and name in operator_names():
        known, how = operator_names()[name]
        return replace(rule_page(root, known), called=f"{name}: rule {known} with {how}")
    rule = rule_attributes(root, name)
    notes = summaries(rule.rule)
    attributes = tuple(
        AttributePage(each.name, expected(each.hint), "" if each.is_required else toml_text(each.default), _flat(notes.get(each.name, "")))
        for each in rule.attributes.values()
    )
    example, signature = _example(root, rule)
    return RulePage(name, _file("rules", root, name), inspect.getdoc(rule.rule) or "", attributes, example, signature)


def rule_pages(root: Path) -> tuple[RulePage, ...]:
    return tuple(rule_page(root, name) for name in plugin_names("rules", root))


def rule_descriptions(root: Path) -> tuple[tuple[str, str], ...]:
    """Return the name of each rule and what its class says, read as text: nothing is imported, so that a list is quick.

    Raise DeclarationError where a file is no Python.
    """
    return tuple((name, _class_description(_tree("rules", root, name))) for name in plugin_names("rules", root))


def _class_description(tree: ast.Module) -> str:
    """Return the description of the last public class: a rule's file ends with the rule."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return (ast.get_docstring(classes[-1]) if classes else None) or ""


def policy_page(root: Path, name: str) -> PolicyPage:
    """Return the page of one policy; raise DeclarationError where there is none of that name, or its file is no Python."""
    tree, tunes = _tree("policies", root, name), is_tuner(root, name)
    options = _options(root, name) if tunes else ()
    kinds, place = kinds_of(root, name), place_in_auto(root, name)
    return PolicyPage(name, _file("policies", root, name), _description(tree), kinds, place, _strings(tree, "TEMPLATES"), options, tunes)


def policy_pages(root: Path) -> tuple[PolicyPage, ...]:
    """Return the pages of all policies, those that `auto` asks first, in its order."""
    pages = [policy_page(root, name) for name in plugin_names("policies", root)]
    return tuple(sorted(pages, key=lambda page: (not page.auto, page.kinds, *page.auto.values(), page.name)))


def template_page(root: Path, name: str) -> TemplatePage:
    """Return the page of one template; raise DeclarationError where there is none of that name, or its file is no Python."""
    return TemplatePage(name, _file("templates", root, name), _description(_tree("templates", root, name)))


def template_pages(root: Path) -> tuple[TemplatePage, ...]:
    return tuple(template_page(root, name) for name in plugin_names("templates", root))


def archs(root: Path) -> tuple[Arch, ...]:
    """Return the archs that files describe, by name; the detected `host` is none of them."""
    return tuple(load_arch(root, name) for name in plugin_names("archs", root) if name != HOST)


def toml_text(value: Any) -> str:
    """Return a value as TOML has it on one line."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_text, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _example(root: Path, rule: RuleAttributes) -> tuple[str, Signature | None]:
    known = _examples().get(rule.name) if _is_standard_shape(rule) else None
    given = (
        [f"{name} = {toml_text(value)}" for name, value in known.items()]
        if known
        else [f"{name} = …" for name in rule.attributes if name in rule.required]
    )
    text = "\n".join(["[[workload]]", f'name = "my_{rule.name}"', f'rule = "{rule.name}"', *given])
    if known is None or any(rule.attributes[name].is_file for name in known):
        return text, None
    return text, rule.rule.of(root, known).signature()


def _is_standard_shape(rule: RuleAttributes) -> bool:
    """Say whether the example of a standard rule fits: a workspace's file of the same name may have other attributes."""
    example = _examples().get(rule.name)
    return example is not None and rule.required <= example.keys() <= rule.attributes.keys()


def example_attrs(root: Path, name: str) -> dict[str, Any]:
    """Return the attributes of a standard rule's example; none where no example is known."""
    return dict(_examples().get(name, {})) if _is_standard_shape(rule_attributes(root, name)) else {}


@functools.cache
def _examples() -> dict[str, dict[str, Any]]:
    return tomli.loads(_EXAMPLES.read_text(encoding="utf-8"))


def _options(root: Path, name: str) -> tuple[AttributePage, ...]:
    from typing import get_type_hints

    options = load_module("policies", root, name).Options
    hints, notes = get_type_hints(options, include_extras=True), summaries(options)
    return tuple(
        AttributePage(each.name, expected(each.hint), toml_text(each.default), _flat(notes.get(each.name, "")))
        for each in attributes_of(options, hints).values()
    )


def _tree(kind: Kind, root: Path, name: str) -> ast.Module:
    file = plugin_file(kind, root, name)
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        from kerneldecl.errors import Problem

        raise DeclarationError([Problem(_file(kind, root, name), f"{file.name} is not Python: {error}")]) from None


def _description(tree: ast.Module) -> str:
    return ast.get_docstring(tree) or ""


def _strings(tree: ast.Module, name: str) -> tuple[str, ...]:
    """Return the strings of a constant tuple or list at the top level of a module; () where there is none."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in statement.targets):
            values: Sequence[ast.expr] = getattr(statement.value, "elts", ())
            return tuple(value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str))
    return ()


def _file(kind: Kind, root: Path, name: str) -> str:
    return shown_in(root, plugin_file(kind, root, name))


def _flat(text: str) -> str:
    return " ".join(text.split())
