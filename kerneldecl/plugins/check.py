"""Owns the checks of plug-ins: whether a class is a rule, and whether a file may be a policy or an entry's `specialize`.

Knows nothing of finding or importing files.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kerneldecl.diagnostics.messages import unknown
from kerneldecl.errors import Problem
from kerneldecl.model import SPECIALIZE
from kerneldecl.plugins.find import PACKAGE, displayed, plugin_file, plugin_names
from kerneldecl.rule import Rule
from kerneldecl.store.regular import read_file

_METHODS = {
    "signature": "the kernel's arguments, as a Signature",
    "lower": "what is computed, in TE or TensorIR",
    "reference": "the same, computed by NumPy or torch",
    "flops": "how many operations a call takes",
}
"""What a rule must have, and what each returns."""
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
        yield f"class {class_name} does not derive from kerneldecl.rule.Rule; write class {class_name}(Rule)"
        return
    if "__dataclass_params__" not in vars(rule) or not vars(rule)["__dataclass_params__"].frozen:
        yield f"class {class_name} is not a frozen dataclass; write @dataclass(frozen=True, kw_only=True) above it"
        return
    for method, returned in _METHODS.items():
        if getattr(rule, method) is getattr(Rule, method):
            yield f"class {class_name} gives no {method}(); it returns {returned}"
    for field in attribute_fields(rule):
        if field.name in _RESERVED:
            yield f"attribute {field.name} of class {class_name} has the name of a key of every workload; choose another name"


def policy_problem(root: Path, name: str) -> Problem | None:
    """Return why a file of the workspace cannot be a policy, judged by its text; it is not run."""
    file = plugin_file("policies", root, name)
    if not file.is_relative_to(root) or file.is_relative_to(PACKAGE):
        return None  # the standard ones have tests
    shown = displayed(file, root)
    try:
        tree = ast.parse(read_file(file))
    except SyntaxError as error:
        return Problem(shown, f"policy {name} is not Python: {error.msg}", "python -m py_compile shows the place", line=error.lineno or 0)
    except ValueError as error:
        return Problem(shown, f"policy {name} is not Python: {error}", "save the file as UTF-8")
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    values = {t.id: node for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    imported = {each.asname or each.name for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names}
    is_own = not {"STANDS_FOR", "IS_TUNER"} & values.keys()
    if is_own and "propose" not in defined | imported | values.keys():
        return Problem(shown, f"policy {name} has no function propose(space, arch, top_k)", "it returns Proposals, best first")
    if is_own and "TEMPLATES" not in values.keys() | imported:
        return Problem(shown, f"policy {name} does not say which templates it names", 'write TEMPLATES = ("cpu_matmul",)')
    return _unknown_template(shown, values.get("TEMPLATES"), plugin_names("templates", root))


def _unknown_template(shown: str, said: ast.Assign | None, templates: Sequence[str]) -> Problem | None:
    items = said.value.elts if said and isinstance(said.value, ast.Tuple | ast.List) else ()
    for item in items:
        if isinstance(item, ast.Constant) and item.value not in templates:
            return Problem(shown, *unknown("template", item.value, templates), line=item.lineno)
    return None


def specialize_problem(root: Path, path: str) -> Problem | None:
    """Return why a file cannot be an entry's `specialize`, judged by its text; it is not run."""
    file = root / path
    try:
        tree = ast.parse(read_file(file))
    except SyntaxError as error:
        return Problem(displayed(file, root), f"{file.name} is not Python: {error.msg}", line=error.lineno or 0)
    except ValueError as error:
        return Problem(displayed(file, root), f"{file.name} is not Python: {error}")
    if any(isinstance(node, ast.FunctionDef) and node.name == SPECIALIZE for node in tree.body):
        return None
    return Problem(displayed(file, root), "there is no function specialize(mod, arch)", "define it at the file's top level")
