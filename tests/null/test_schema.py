"""Owns the tests of the JSON Schema: it accepts what `declare` accepts, and refuses what an editor should mark.

Knows nothing of any editor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from kerneldecl.declare.document import declare
from kerneldecl.declare.json_schema import json_schema
from kerneldecl.declare.toml_keys import ARTIFACT, SETTINGS, TARGET, TOOLCHAIN, WORKLOAD, Key
from kerneldecl.errors import DeclarationError
from kerneldecl.plugins.find import plugin_names
from kerneldecl.plugins.load import load_rule

Write = Callable[[Mapping[str, str]], Path]

HEAD = 'edition = 1\n[artifact]\nname = "a"\nversion = "1"\n[target.host]\narch = "host"\n'
MATMUL = '[[workload]]\nname = "a"\nrule = "matmul"\n'


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "own").mkdir()
    (folder / "own/gemm.py").write_text("def specialize(mod, arch):\n    return None\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def validator(root: Path) -> jsonschema.Draft202012Validator:
    schema = json_schema(root)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(json.loads(json.dumps(schema)))


def is_declared(root: Path, text: str) -> bool:
    try:
        declare(root, text.encode())
    except DeclarationError:
        return False
    return True


GOOD = {
    "plain": HEAD + MATMUL + "m = 1\nn = 2\nk = 3\n",
    "lists": HEAD + MATMUL + 'm = [1, 2]\nn = 2\nk = 3\nlayout = ["nn", "nt"]\nepilogue = [["bias"], []]\n',
    "one epilogue": HEAD + MATMUL + 'm = 1\nn = 2\nk = 3\nepilogue = ["bias", "relu"]\n',
    "cases": HEAD + MATMUL + 'k = 3\ncases = [{m = 1, n = 2}, {m = 3, n = 4, epilogue = ["relu"]}]\n',
    "settings": HEAD + '[defaults]\ntop_k = 2\npolicy = "auto"\n[toolchain]\ntvm = "0.27.0.post1"\n' + MATMUL
    + 'm = 1\nn = 1\nk = 1\ntargets = ["host"]\ntolerance = 0.1\ntags = ["x"]\ngeneration = 1\n',
    "custom kernels": HEAD + MATMUL + 'm = 1\nn = 2\nk = 3\nspecialize = "own/gemm.py"\n',
    "other rule": HEAD + '[[workload]]\nname = "s"\nrule = "softmax"\nshape = [[4, 8], [16, 8]]\n',
}  # fmt: skip

BAD = {
    "unknown key": GOOD["plain"].replace("edition = 1\n", "edition = 1\nx = 1\n"),
    "unknown edition": GOOD["plain"].replace("edition = 1", "edition = 2"),
    "no version": GOOD["plain"].replace('version = "1"\n', ""),
    "unknown tool": HEAD + '[toolchain]\nllvm = "22"\n' + MATMUL + "m = 1\nn = 2\nk = 3\n",
    "unknown arch": GOOD["plain"].replace('arch = "host"', 'arch = "hots"'),
    "unknown policy": GOOD["settings"].replace('"auto"', '"atuo"'),
    "unknown rule": GOOD["plain"].replace("matmul", "matmull"),
    "attribute of another rule": GOOD["plain"] + "shape = [1]\n",
    "unknown layout": GOOD["plain"] + 'layout = "nq"\n',
    "unknown layout in a list": GOOD["plain"] + 'layout = ["nn", "nq"]\n',
    "unknown step": GOOD["plain"] + 'epilogue = ["rleu"]\n',
    "zero": GOOD["plain"].replace("m = 1", "m = 0"),
    "string": GOOD["plain"].replace("m = 1", 'm = "1"'),
    "true": GOOD["plain"].replace("m = 1", "m = true"),
    "missing": GOOD["plain"].replace("m = 1\n", ""),
    "empty list": GOOD["plain"].replace("m = 1", "m = []"),
    "empty cases": GOOD["plain"].replace("m = 1", "cases = []"),
    "unknown attribute in cases": GOOD["cases"].replace("m = 1", "mm = 1"),
    "name": GOOD["plain"].replace('name = "a"\nrule', 'name = "a b"\nrule'),
    "top_k": GOOD["settings"].replace("top_k = 2", "top_k = 0"),
    "specialize": GOOD["plain"] + 'specialize = "own.txt"\n',
    "no workloads": HEAD,
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_declared_is_valid(root: Path, validator: jsonschema.Draft202012Validator, name: str) -> None:
    assert is_declared(root, GOOD[name])
    validator.validate(tomli.loads(GOOD[name]))


@pytest.mark.parametrize("name", BAD)
def test_what_is_invalid_is_not_declared_either(root: Path, validator: jsonschema.Draft202012Validator, name: str) -> None:
    assert not validator.is_valid(tomli.loads(BAD[name]))
    assert not is_declared(root, BAD[name])


def test_editors_find_summaries_defaults_and_choices(validator: jsonschema.Draft202012Validator) -> None:
    matmul = validator.schema["$defs"]["matmul"]
    rule = load_rule(Path(), "matmul")
    assert rule.__doc__
    assert matmul["description"] == rule.__doc__
    assert matmul["properties"]["m"]["description"] == "Rows of C."
    layout = matmul["properties"]["layout"]
    assert layout["default"] == "nn"
    assert ["nn", "nt", "tn", "tt"] in [choice.get("enum") for choice in layout["anyOf"]]
    assert set(validator.schema["$defs"]) == set(plugin_names("rules", Path()))


def test_a_rule_of_the_workspace_is_in_the_schema_and_a_broken_one_is_an_error(write_files: Write) -> None:
    text = '''\
from kerneldecl.rule import *
from dataclasses import dataclass

@dataclass(frozen=True)
class Base(Rule):
    n: Extent
    """Of the base."""
    def signature(self): ...
    def lower(self): ...
    def reference(self): ...
    def flops(self): ...

@dataclass(frozen=True)
class Mine(Base):
    """My rule."""
    x: float = 0.5
    """Of the rule."""
    y: tuple[int, int] = (1, 2)
'''
    root = write_files({"rules/mine.py": text, "rules/bad.py": "1 / 0"})
    with pytest.raises(DeclarationError, match=r"rules/bad\.py:1: rule bad fails to import: ZeroDivisionError"):
        json_schema(root)
    (root / "rules" / "bad.py").unlink()
    properties = json_schema(root)["$defs"]["mine"]["properties"]
    assert [properties[name].get("description") for name in "nxy"] == ["Of the base.", "Of the rule.", None]
    assert properties["x"]["default"] == 0.5
    pair, many = properties["y"]["anyOf"]
    assert jsonschema.Draft202012Validator(pair).is_valid([1, 2])
    assert not jsonschema.Draft202012Validator(pair).is_valid([1, 2, 3])
    assert jsonschema.Draft202012Validator(many).is_valid([[1, 2], [3, 4]])


VALUES = st.recursive(
    st.integers(-2, 30) | st.booleans() | st.floats(allow_nan=True) | st.sampled_from(["", "a", "a b", "0.27.0.post1", "é", "1+2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)
KEYS = [(where, name, key) for where, keys in (("artifact", ARTIFACT), ("toolchain", TOOLCHAIN), ("target", TARGET), ("defaults", SETTINGS),
        ("workload", WORKLOAD)) for name, key in keys.items()]  # fmt: skip


def _has_odd_number(value: Any) -> bool:
    """Whether JSON Schema and TOML disagree on a number: 1.0 is an integer to the one, infinity no value to it."""
    if isinstance(value, list | dict):
        return any(map(_has_odd_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and (not math.isfinite(value) or value.is_integer())


@pytest.mark.parametrize(("where", "name", "key"), KEYS, ids=[f"{where}.{name}" for where, name, _ in KEYS])
@settings(deadline=None, max_examples=40)
@given(value=VALUES.filter(lambda value: not _has_odd_number(value)))
def test_checker_and_schema_agree_on_the_keys_of_every_table(where: str, name: str, key: Key, value: Any) -> None:
    assert key.is_right(value) == jsonschema.Draft202012Validator(key.schema).is_valid(value), (where, name)
