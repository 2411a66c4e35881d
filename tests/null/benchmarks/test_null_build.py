"""Names that the benchmarks' modules import from each other exist, also where only a GPU runs them; null_build.py runs."""

from __future__ import annotations

import ast
from pathlib import Path

import null_build
import pytest
from bench_support.many_entries import one_table, shapes_of
from support.repository import REPOSITORY

FOLDER = REPOSITORY / "benchmarks"
MODULES = {
    ".".join(path.relative_to(FOLDER).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.rglob("*.py")
}


def names_of(module: ast.Module) -> set[str]:
    """Return the names that a module defines or imports at its top level."""
    found: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return found


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imported_names_exist(name: str) -> None:
    imports = [node for node in ast.walk(MODULES[name]) if isinstance(node, ast.ImportFrom) and node.module in MODULES]
    missing = [
        f"{node.module}.{alias.name}" for node in imports for alias in node.names if alias.name not in names_of(MODULES[node.module or ""])
    ]
    assert not missing


def test_support_modules_are_found() -> None:
    imported = {node.module for module in MODULES.values() for node in ast.walk(module) if isinstance(node, ast.ImportFrom)}
    support = {name for name in MODULES if "." in name}
    assert support == {name for name in imported if name and name.startswith("bench_support.")}


def test_null_builds_and_plans_after_edits_are_measured(tmp_path: Path) -> None:
    """Each run prints what is expected, or ends this process."""
    rows = null_build.null_builds(tmp_path, 2, rounds=1)
    assert {"kerneldecl, a table each", "kerneldecl, one table"} <= {row["tool"] for row in rows}
    editor = null_build.Editor(tmp_path / "one-table", one_table, shapes_of(2))
    editor.after_comment("build")
    editor.after_change()
    editor.restore()
