"""The benchmarks' modules give each other what they ask for, also where only a GPU would run the line that asks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.py")}


def names_of(module: ast.Module) -> set[str]:
    """Return what a module has: what it defines and what it imports, at its top."""
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
def test_what_is_imported_is_there(name: str) -> None:
    asked = [node for node in ast.walk(MODULES[name]) if isinstance(node, ast.ImportFrom) and node.module in MODULES]
    missing = [
        f"{node.module}.{alias.name}" for node in asked for alias in node.names if alias.name not in names_of(MODULES[node.module or ""])
    ]
    assert not missing
