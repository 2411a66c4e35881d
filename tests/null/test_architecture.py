"""Owns the checks of the code's own rules: sizes, imports, who may print.

Knows nothing of behaviour.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kerneldecl

PACKAGE = Path(kerneldecl.__file__).parent
MODULES = sorted(path for folder in (PACKAGE, PACKAGE.parent / "rules") for path in folder.rglob("*.py"))
CORE = [path for path in MODULES if path.parent == PACKAGE]
KNOW_TVM = {"compiler", "templates", "rules", "relax", "runners", "dlight"}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def calls(path: Path, name: str) -> list[int]:
    nodes = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
    return [node.lineno for node in nodes if isinstance(node.func, ast.Name) and node.func.id == name]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_short_and_say_what_they_own(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < 400
    docstring = ast.get_docstring(tree_of(path)) or ""
    if path.name != "__init__.py":
        first, _, rest = docstring.partition("\n")
        assert first.startswith("Owns ")
        assert "nothing of" in rest, "line 2 says what the module does not know"


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_the_core_does_not_import_tvm(path: Path) -> None:
    assert not [name for name in imports(path) if name.partition(".")[0] == "tvm"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_tvm_is_imported_in_few_places(path: Path) -> None:
    if not KNOW_TVM & set(path.relative_to(PACKAGE.parent).parts):
        assert not [name for name in imports(path) if name.partition(".")[0] == "tvm"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_command_line_prints(path: Path) -> None:
    assert calls(path, "print") == [] or path.parent.name == "cli"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_code_compares_names_of_archs(path: Path) -> None:
    compared = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Compare)]
    sides = (side for node in compared for side in (node.left, *node.comparators))
    names = (side for side in sides if isinstance(side, ast.Attribute) and side.attr == "name")
    assert not [node for node in names if isinstance(node.value, ast.Name) and node.value.id == "arch"]


def test_broad_excepts_stand_where_others_code_runs() -> None:
    """Runners run candidates, plug-ins are someone's code, and the command line is the last resort."""
    broad = {
        name_of(path)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
        and {"Exception", "BaseException"} & {n.id for n in ast.walk(node.type or node) if isinstance(n, ast.Name)}
    }
    allowed = {"kerneldecl/cli/commands.py", "kerneldecl/plugins/load.py", "kerneldecl/store/local.py", "kerneldecl/runners/worker.py"}
    assert broad <= allowed
