"""The constants that docs/concepts/gpu-models.md lists are those of the models: a renamed or refitted one is noticed there."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from support.repository import REPOSITORY

import kerneldecl

PACKAGE = Path(kerneldecl.__file__).parent
ROW = re.compile(r"^\|(?P<names>[^|]*`[A-Z][A-Z0-9_]+`[^|]*)\|(?P<values>[^|]*)\|", re.MULTILINE)


def constants() -> dict[str, set[str]]:
    """Return the source of each constant's values: several modules may have constants of one name."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in (*(PACKAGE / "policies").rglob("*.py"), *(PACKAGE / "analysis").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign):
                several = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
                names = node.targets[0].elts if several else [node.targets[0]]  # type: ignore[attr-defined]
                values = node.value.elts if several else [node.value]  # type: ignore[attr-defined]
                for name, value in zip(names, values, strict=True):
                    found[ast.unparse(name)].add(ast.unparse(value))
    return found


def test_every_documented_constant_is_there_with_its_value() -> None:
    document = (REPOSITORY / "docs/concepts/gpu-models.md").read_text(encoding="utf-8")
    known, rows = constants(), list(ROW.finditer(document))
    assert len(rows) > 40
    for row in rows:
        names = re.findall(r"`([A-Z][A-Z0-9_]+)`", row["names"])
        assert set(names) <= known.keys(), row[0]
        values = [value.strip() for value in row["values"].split(",")]
        if len(values) == len(names) and all(re.fullmatch(r"[\d.e-]+", value) for value in values):
            for name, value in zip(names, values, strict=True):
                assert float(value) in {float(each) for each in known[name] if re.fullmatch(r"[\d.e-]+", each)}, row[0]
