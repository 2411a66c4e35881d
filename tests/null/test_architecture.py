"""Owns the checks of the code's own rules: sizes, imports, who may print.

Knows nothing of behaviour.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.spaces import clean_environment

import kerneldecl

PACKAGE = Path(kerneldecl.__file__).parent
MODULES = sorted(path for folder in (PACKAGE, PACKAGE.parent / "rules") for path in folder.rglob("*.py"))
MOST_LINES, MOST_PARAMETERS = 60, 6
KNOW_TVM = {"compiler", "templates", "rules", "relax", "runners", "dlight", "deploy", "export", "torch"}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def imports(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def calls(path: Path, name: str) -> list[int]:
    nodes = (node for node in nodes_of(path) if isinstance(node, ast.Call))
    return [node.lineno for node in nodes if isinstance(node.func, ast.Name) and node.func.id == name]


def test_modules_are_short_and_say_what_they_own() -> None:
    assert len(MODULES) > 100
    assert not [f"{name_of(path)}: {words}" for path in MODULES for words in objections(path)]


def objections(path: Path) -> Iterator[str]:
    if path.read_text(encoding="utf-8").count("\n") >= 400:
        yield "is long"
    if path.name != "__init__.py":
        first, _, rest = (ast.get_docstring(tree_of(path)) or "").partition("\n")
        if not first.startswith("Owns "):
            yield "does not say what it owns"
        if "nothing of" not in rest:
            yield "does not say what it does not know"


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in nodes_of(path) if isinstance(node, ast.FunctionDef))


def test_functions_are_short_and_take_few_parameters() -> None:
    long = [f"{name_of(path)}: {f.name}" for path in MODULES for f in functions(path) if (f.end_lineno or 0) - f.lineno >= MOST_LINES]
    assert not long
    taken = {f"{name_of(path)}: {f.name}": parameters(f) for path in MODULES for f in functions(path)}
    assert not [name for name, count in taken.items() if count > MOST_PARAMETERS]


def parameters(function: ast.FunctionDef) -> int:
    """Return how many a caller gives: `self` and `cls` are no choice of theirs."""
    given = function.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_no_module_hides_behind_an_underscore() -> None:
    """A family of modules has a folder instead."""
    assert not [name_of(path) for path in MODULES if path.name.startswith("_") and path.name not in {"__init__.py", "__main__.py"}]


def test_tvm_is_imported_in_few_places() -> None:
    others = [path for path in MODULES if not KNOW_TVM & set(path.relative_to(PACKAGE.parent).parts)]
    assert len(others) > 50
    assert not [name_of(path) for path in others if "tvm" in {name.partition(".")[0] for name in imports(path)}]


def test_only_the_command_line_prints() -> None:
    assert {path.parent for path in MODULES if calls(path, "print")} == {PACKAGE / "cli"}


def test_no_code_compares_names_of_archs() -> None:
    assert not [name_of(path) for path in MODULES if compares_names_of_archs(path)]


def compares_names_of_archs(path: Path) -> bool:
    compared = [node for node in nodes_of(path) if isinstance(node, ast.Compare)]
    sides = (side for node in compared for side in (node.left, *node.comparators))
    names = (side for side in sides if isinstance(side, ast.Attribute) and side.attr == "name")
    return any(isinstance(node.value, ast.Name) and node.value.id == "arch" for node in names)


def is_broad(handler: ast.ExceptHandler) -> bool:
    named = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else set()
    return handler.type is None or bool({"Exception", "BaseException"} & named)


@pytest.mark.parametrize(
    ("clause", "expected"),
    [("", True), (" Exception as error", True), (" (OSError, BaseException)", True), (" OSError as error", False)],
)
def test_a_broad_except_is_recognised(clause: str, expected: bool) -> None:
    (handler,) = (node for node in ast.walk(ast.parse(f"try:\n    f()\nexcept{clause}:\n    g()\n")) if isinstance(node, ast.ExceptHandler))
    assert is_broad(handler) is expected


def test_broad_excepts_stand_where_others_code_runs() -> None:
    """Runners run candidates, plug-ins are someone's code, and the command line is the last resort."""
    broad = {name_of(path) for path in MODULES for node in nodes_of(path) if isinstance(node, ast.ExceptHandler) and is_broad(node)}
    allowed = {"kerneldecl/cli/commands.py", "kerneldecl/plugins/load.py", "kerneldecl/store/local.py", "kerneldecl/runners/worker.py"}
    assert broad <= allowed


def test_loading_an_artifact_imports_neither_planner_nor_linker() -> None:
    code = "import sys, kerneldecl; kerneldecl.load; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "kerneldecl.artifact.load" in loaded
    assert not loaded & {"pydantic", "click", "tomli", "rich", "tvm", "kerneldecl.artifact.link", "kerneldecl.api"}
    assert not [name for name in loaded if name.startswith(("kerneldecl.planning", "kerneldecl.declare", "kerneldecl.stages"))]
