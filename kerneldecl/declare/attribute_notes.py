"""Owns what is written below the attributes of a rule, or the options of a tuner: a string literal each.

Knows nothing of types or of who reads it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterable
from typing import Any

from kerneldecl.rule import Rule


def summaries(dataclass: type[Any]) -> dict[str, str]:
    """Return the string literals below a dataclass's attributes, those of the classes that it derives from included."""
    found: dict[str, str] = {}
    for cls in reversed(dataclass.__mro__):
        if cls not in {Rule, object} and issubclass(cls, Rule) == issubclass(dataclass, Rule):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
            assert isinstance(definition, ast.ClassDef)
            found |= dict(_literals_below(definition.body))
    return found


def _literals_below(body: list[ast.stmt]) -> Iterable[tuple[str, str]]:
    for above, below in itertools.pairwise(body):
        if not isinstance(above, ast.AnnAssign) or not isinstance(above.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield above.target.id, inspect.cleandoc(below.value.value)
