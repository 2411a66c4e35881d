"""Owns the checks of plug-ins: whether a class is a rule, and whether a file may be an entry's `specialize`.

Knows nothing of finding or importing files.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kerneldecl.errors import Problem
from kerneldecl.model import SPECIALIZE
from kerneldecl.plugins.find import displayed
from kerneldecl.rule import Rule

_METHODS = ("signature", "lower", "reference", "flops")
# Attributes share a table with these keys of every workload.
_RESERVED = frozenset(
    {"name", "rule", "targets", "policy", "budget", "top_k", "tolerance", "generation", "specialize", "nan", "tags", "cases"}
)


def attribute_fields(rule: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Return the dataclass fields that are attributes, in order of the class."""
    return tuple(field for field in dataclasses.fields(rule) if field.init)


def why_not_rule(rule: Any, name: str, class_name: str) -> str:
    """Return why a module's attribute is not a rule, empty where it is one."""
    return next(_defects(rule, name, class_name), "")


def _defects(rule: Any, name: str, class_name: str) -> Iterator[str]:
    if not isinstance(rule, type):
        yield f"rule {name} has no class {class_name}; a rule file holds a class of the file's name, in CamelCase"
        return
    if not issubclass(rule, Rule):
        yield f"class {class_name} does not derive from kerneldecl.rule.Rule"
        return
    if "__dataclass_params__" not in vars(rule) or not vars(rule)["__dataclass_params__"].frozen:
        yield f"class {class_name} is not a frozen dataclass; write @dataclass(frozen=True, kw_only=True) above it"
        return
    for method in _METHODS:
        if getattr(rule, method) is getattr(Rule, method):
            yield f"class {class_name} gives no {method}()"
    for field in attribute_fields(rule):
        if field.name in _RESERVED:
            yield f"attribute {field.name} of class {class_name} has the name of a key of every workload"


def specialize_problem(root: Path, path: str) -> Problem | None:
    """Return why a file cannot be an entry's `specialize`, judged by its text; it is not run."""
    file = root / path
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        return Problem(displayed(file, root), f"{file.name} is not Python: {error.msg}", line=error.lineno or 0)
    except ValueError as error:
        return Problem(displayed(file, root), f"{file.name} is not Python: {error}")
    if any(isinstance(node, ast.FunctionDef) and node.name == SPECIALIZE for node in tree.body):
        return None
    return Problem(displayed(file, root), "there is no function specialize(mod, arch)", "define it at the file's top level")
