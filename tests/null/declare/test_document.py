"""Owns the tests of workloads.toml -> Declaration: what a right file means, and the text of every mistake.

Knows nothing of the standard rules, but for one test of the published example.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kerneldecl.declare.document import Declaration, declare, parse, scope_of
from kerneldecl.declare.select import select
from kerneldecl.declare.workload_table import expand_table
from kerneldecl.diagnostics import line_numbers
from kerneldecl.errors import DeclarationError, ExitCode, PatternError
from kerneldecl.model import Workload
from kerneldecl.plugins import find
from kerneldecl.rows import Rows, rows_field
from kerneldecl.toolchain.versions import PINS

Write = Callable[[Mapping[str, str]], Path]

HEAD = """\
edition = 1

[artifact]
name = "ops"
version = "0.1.0"

[target.host]
arch = "host"

"""
"""Nine lines: the first table after it stands in line 10."""
METHODS = """
    def signature(self): ...
    def lower(self): ...
    def reference(self, *inputs): ...
    def flops(self): ...
"""
GEMM = f'''\
from dataclasses import dataclass
from typing import Literal

from kerneldecl.rule import Extent, Rule, Size, WorkspaceFile


@dataclass(frozen=True, kw_only=True)
class Gemm(Rule):
    """A GEMM."""

    m: Extent
    """Rows."""
    n: Extent
    """Columns."""
    layout: Literal["nn", "nt", "tn", "tt"] = "nn"
    epilogue: tuple[Literal["bias", "relu", "gelu"], ...] = ()
    shape: tuple[Extent, ...] = ()
    pad: Size | tuple[Size, Size] = 0
    eps: float = 1e-5
    fast: bool = False
    source: WorkspaceFile = ""

    def problems(self):
        if self.fast and self.eps == 0:
            yield "fast needs eps above 0"
        if self.layout == "tt":
            raise LookupError(self.eps)
{METHODS}'''

POLICY = "TEMPLATES = ()\n\n\ndef propose(space, arch, top_k):\n    return ()\n"
OWN_PLUGINS = {"rules/gemm.py": GEMM, "policies/auto.py": POLICY, "policies/greedy.py": POLICY, "ir/a.json": "{}"}


def table(name: str, rule: str = "gemm", /, **attrs: str) -> str:
    lines = [f'name = "{name}"', f'rule = "{rule}"', *(f"{key} = {value}" for key, value in attrs.items())]
    return "[[workload]]\n" + "\n".join(lines) + "\n"


@pytest.fixture
def workspace(write_files: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a workspace with plug-ins of its own; the standard ones, whose names would stand in texts of mistakes, are hidden."""
    monkeypatch.setattr(find, "PACKAGE", tmp_path / "package" / "kerneldecl")
    return write_files(OWN_PLUGINS)


def declared(root: Path, text: str) -> Declaration:
    return declare(root, (HEAD + text).encode())


def mistakes(root: Path, content: bytes | None = None) -> str:
    with pytest.raises(DeclarationError) as caught:
        declare(root, content)
    assert caught.value.exit_code == ExitCode.USAGE
    return str(caught.value).replace(str(root), "WORKSPACE") + "\n"


# What a right file means


def test_the_published_example(write_files: Write) -> None:
    text = """\
edition = 1
[artifact]
name = "reference-operators"
version = "0.1.0"
[toolchain]
tvm = "0.27.0.post1"
cuda = "13.0"
[target.host]
arch = "host"
[defaults]
targets = ["host"]
policy = "auto"
top_k = 20
[[workload]]
name = "qkv_projection"
rule = "matmul"
m = [16, 512]
n = 1024
k = 1024
layout = "nt"
dtype = "float32"
accum_dtype = "float32"
out_dtype = "float32"
epilogue = ["bias", "relu"]
"""
    declaration = declare(write_files({"workloads.toml": text}))
    assert (declaration.artifact, declaration.version) == ("reference-operators", "0.1.0")
    assert declaration.toolchain == PINS
    assert declaration.targets == (("host", "host"),)
    assert [workload.entry for workload in declaration.workloads] == ["qkv_projection[m=16]@host", "qkv_projection[m=512]@host"]
    first = declaration.workloads[0]
    assert (first.rule, first.policy, first.top_k, first.tolerance, first.tags, first.line) == ("matmul", "auto", 20, None, (), 14)
    attrs = dict(first.attrs)
    assert attrs["m"] == 16
    assert attrs["epilogue"] == ("bias", "relu")
    assert attrs["batch"] == 0
    assert [name for name, _ in first.attrs] == sorted(attrs)


def test_settings_of_a_table_win_over_defaults_and_those_over_the_pins(workspace: Path) -> None:
    text = (
        '[target.other]\narch = "host"\n[defaults]\ntargets = ["other"]\npolicy = "greedy"\ntop_k = 3\ntolerance = 1\n'
        '[toolchain]\ncuda = "12.9"\n'
        + table("a", m="1", n="1")
        + table("b", m="1", n="1", targets='["host", "other"]', policy='"auto"', top_k="7", tolerance="0.5", tags='["hot"]', generation="2")
    )
    declaration = declared(workspace, text)
    assert declaration.toolchain == {**PINS, "cuda": "12.9"}
    a, *b = declaration.workloads
    assert (a.entry, a.policy, a.top_k, a.tolerance, a.tags, a.generation) == ("a@other", "greedy", 3, 1.0, (), 0)
    assert [workload.entry for workload in b] == ["b@host", "b@other"]
    assert {(w.policy, w.top_k, w.tolerance, w.tags, w.generation) for w in b} == {("auto", 7, 0.5, ("hot",), 2)}


def test_the_timing_of_an_entry_wins_over_its_targets_and_that_over_the_defaults(workspace: Path) -> None:
    text = '[target.other]\narch = "host"\ntiming = "isolated"\n' + table("a", m="1", n="1") + table("b", m="1", n="1", timing='"both"')
    assert [w.timing for w in declared(workspace, text).workloads] == ["cool", "isolated", "both", "both"]
    text = '[defaults]\ntiming = "steady"\n' + text
    assert [w.timing for w in declared(workspace, text).workloads] == ["steady", "isolated", "both", "both"]


@pytest.mark.parametrize("place", ["[defaults]\n", '[target.other]\narch = "host"\n', table("a", m="1", n="1")])
@pytest.mark.parametrize("timing", ['"warm"', "1", '["steady"]'])
def test_a_timing_is_one_of_four(workspace: Path, place: str, timing: str) -> None:
    text = f"{place}timing = {timing}\n" + table("z", m="1", n="1")
    with pytest.raises(DeclarationError, match="expected cool, steady, isolated or both"):
        declared(workspace, text)


def test_entries_are_built_for_every_target_where_none_is_named(workspace: Path) -> None:
    text = '[target.second]\narch = "host"\n' + table("a", m="1", n="1")
    assert [workload.entry for workload in declared(workspace, text).workloads] == ["a@host", "a@second"]


@pytest.mark.parametrize(
    ("attrs", "names"),
    [
        ({"m": "[16, 512]"}, ["a[m=16]", "a[m=512]"]),
        ({"m": "[16]"}, ["a[m=16]"]),
        ({"m": "[1, 2]", "n": "[3, 4]"}, ["a[m=1,n=3]", "a[m=1,n=4]", "a[m=2,n=3]", "a[m=2,n=4]"]),
        ({"shape": "[[128, 8192], [7, 9]]"}, ["a[shape=128x8192]", "a[shape=7x9]"]),
        ({"shape": "[[]]"}, ["a[shape=none]"]),
        ({"epilogue": '[["bias", "relu"], []]'}, ["a[epilogue=bias+relu]", "a[epilogue=none]"]),
        ({"epilogue": '["bias", "relu"]'}, ["a"]),
        ({"epilogue": "[]"}, ["a"]),
        ({"pad": "[1, 2]"}, ["a"]),
        ({"pad": "[[1, 2], [3, 4]]"}, ["a[pad=1x2]", "a[pad=3x4]"]),
        ({"eps": "[1e-5, 1, 0.5]"}, ["a[eps=1e-05]", "a[eps=1]", "a[eps=0.5]"]),
        ({"fast": "[true, false]"}, ["a[fast=true]", "a[fast=false]"]),
        ({"source": '["ir/a.json"]'}, ["a[source=ir/a.json]"]),
        ({"cases": "[{m = 1, n = 2}, {m = 3, n = 4}]"}, ["a[m=1,n=2]", "a[m=3,n=4]"]),
        ({"cases": "[{m = 1}, {m = 2, eps = 1}]"}, ["a[m=1]", "a[m=2,eps=1]"]),
        ({"cases": '[{shape = [1, 2], epilogue = ["relu"]}]'}, ["a[shape=1x2,epilogue=relu]"]),
        ({"fast": "[true, false]", "cases": "[{m = 1}, {m = 2}]"}, [f"a[fast={f},m={m}]" for f in ("true", "false") for m in (1, 2)]),
    ],
)
def test_lists_and_cases_expand_and_name_the_entries(workspace: Path, attrs: dict[str, str], names: list[str]) -> None:
    given_in_cases = attrs.get("cases", "")
    fixed = {name: "9" for name in ("m", "n") if name not in attrs and f"{name} =" not in given_in_cases}
    workloads = declared(workspace, table("a", **fixed, **attrs)).workloads
    assert [workload.name for workload in workloads] == names
    assert len({workload.attrs for workload in workloads}) == len(names)


def test_rows_at_run_time_are_an_entry_for_each_number_that_is_tuned(workspace: Path) -> None:
    text = table("a", m="{ upto = 31, tuned = [1, 16] }", n="[2, 3]") + table("b", m="1", n="1", shape="[{ upto = 9, tuned = [4] }, 5]")
    one, many, *others, listed = declared(workspace, text).workloads
    assert [one.name, many.name, *(other.name for other in others)] == [f"a[n={n},m={m}]" for n in (2, 3) for m in ("1", "16of31")]
    assert (rows_field(one.rows, one.attrs), rows_field(many.rows, many.attrs)["rows"]["upto"]) == ({}, 31)
    assert many.rows == Rows("a[n=2]", "m", -1, 31, (1, 16))
    assert many.rows.at(dict(many.attrs), 7) == {**dict(many.attrs), "m": 7}
    assert (listed.name, dict(listed.attrs)["shape"], listed.rows) == ("b[shape=4of9x5]", (4, 5), Rows("b", "shape", 0, 9, (4,)))
    assert listed.rows.at(dict(listed.attrs), 7)["shape"] == (7, 5)


def test_a_whole_number_is_the_same_as_its_float_where_a_number_is_expected(workspace: Path) -> None:
    one, other = declared(workspace, table("a", m="1", n="1", eps="1") + table("b", m="1", n="1", eps="1.0")).workloads
    assert one.attrs == other.attrs
    assert type(dict(one.attrs)["eps"]) is float


EXPANDABLE = {
    "m": st.integers(1, 4096),
    "n": st.integers(1, 4096),
    "layout": st.sampled_from(["nn", "nt", "tn"]),
    "fast": st.booleans(),
    "shape": st.nothing(),
}
TOML_TEXT = {True: "true", False: "false"}


def toml(value: object) -> str:
    if isinstance(value, bool):
        return TOML_TEXT[value]
    return repr(value).replace("'", '"').replace("True", "true").replace("False", "false")


@st.composite
def expansions(draw: st.DrawFn) -> tuple[list[str], dict[str, list[object]]]:
    """Draw an order of keys and a list of distinct values for each."""
    order = draw(st.permutations(sorted(EXPANDABLE)))
    rank = draw(st.integers(0, 3))  # shapes of one entry have one
    drawn = {**EXPANDABLE, "shape": st.lists(st.integers(1, 99), min_size=rank, max_size=rank)}
    values = {key: draw(st.lists(drawn[key], min_size=1, max_size=3, unique_by=repr)) for key in order}
    return order, values


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=expansions())
def test_an_expansion_is_the_cartesian_product_of_its_lists_and_its_names_have_the_values(
    workspace: Path, drawn: tuple[list[str], dict[str, list[object]]]
) -> None:
    order, values = drawn
    workloads = declared(workspace, table("a", **{key: toml(values[key]) for key in order})).workloads
    wanted = [dict(zip(order, combination, strict=True)) for combination in itertools.product(*(values[key] for key in order))]
    assert len(workloads) == len(wanted) == len({workload.name for workload in workloads})
    for workload, attrs in zip(workloads, wanted, strict=True):
        got = dict(workload.attrs)
        assert {key: list(got[key]) if isinstance(got[key], tuple) else got[key] for key in order} == attrs
        words = dict(part.split("=") for part in workload.name.removeprefix("a[").removesuffix("]").split(","))
        assert list(words) == order
        assert words["m"] == str(attrs["m"])
        assert words["shape"] == ("x".join(map(str, attrs["shape"])) or "none")  # type: ignore[call-overload]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=expansions(), data=st.data())
def test_the_order_of_keys_changes_names_only(
    workspace: Path, drawn: tuple[list[str], dict[str, list[object]]], data: st.DataObject
) -> None:
    order, values = drawn
    other = data.draw(st.permutations(order))
    one, two = (declared(workspace, table("a", **{key: toml(values[key]) for key in keys})).workloads for keys in (order, other))
    assert {workload.attrs for workload in one} == {workload.attrs for workload in two}


def test_one_table_alone_expands_as_in_its_file(workspace: Path) -> None:
    content = (HEAD + table("a", m="[1, 2]", n="1") + table("b", m="1", n="[3, 4]", layout='"nt"')).encode()
    document = parse(content)
    scope = scope_of(workspace, document)
    lines = [10, 15]
    alone = [expand_table(document["workload"][i], scope, line) for i, line in enumerate(lines)]
    assert tuple(w for expansion in alone for w in expansion.workloads) == declare(workspace, content).workloads
    assert expand_table({"name": "c", "rule": "gemm", "m": 1}, scope).findings


def test_byte_order_mark_and_windows_line_ends(workspace: Path) -> None:
    text = (HEAD + table("a", m="1", n="1")).replace("\n", "\r\n")
    (workload,) = declare(workspace, b"\xef\xbb\xbf" + text.encode()).workloads
    assert workload.line == 10


# Lines


PIECES = st.sampled_from(
    [
        "# [[workload]]\n",
        "\n",
        't{i} = """\n[[workload]]\nm = 1\n\\""" "" """\n',
        "t{i} = '''\n[[workload]]\n'' x'''\n",
        't{i} = [\n  ["workload"], # ]\n  [["a", "]"]],\n]\n',
        "t{i} = {{ a = 1, b = '[[workload]]' }}\n",
        't{i}."#" . \'b c\' = "\\"[[workload]]"\n',
    ]
)


HEADERS = st.sampled_from(["[[workload]]", "  [[ workload ]] # x", '[["workload"]]'])
LONG_STRINGS = ['t{i} = """\n[[workload]]\n"""\n', "t{i} = '''\n[[workload]]\n'''\n"]


@settings(deadline=None)
@example([[LONG_STRINGS[0]]], '[["workload"]]')
@example([[LONG_STRINGS[1]]], '[["workload"]]')
@given(st.lists(st.lists(PIECES, max_size=4), min_size=1, max_size=6), HEADERS)
def test_tables_are_numbered_by_their_header_whatever_strings_and_comments_hold(bodies: list[list[str]], header: str) -> None:
    text, wanted, i = "", [], 0
    for body in bodies:
        wanted.append(text.count("\n") + 1)
        text += header + "\n"
        for piece in body:
            text, i = text + piece.format(i=i), i + 1
        text += f"[workload.sub]\nx = {i}\n[[workload.many]]\n[[workload.many]]\ny = 1\n"
    parse(b"edition = 1\n" + text.encode())
    assert line_numbers.array_lines(text, "workload", len(bodies)) == tuple(wanted)
    lines = line_numbers.key_lines(text)
    assert [lines["workload", position] for position in range(len(bodies))] == wanted
    for position in range(len(bodies)):
        assert text.split("\n")[lines["workload", position, "sub", "x"] - 1].startswith("x = ")
        assert text.split("\n")[lines["workload", position, "many", 1, "y"] - 1] == "y = 1"


def test_an_inline_array_of_tables_is_located_at_its_key() -> None:
    assert line_numbers.array_lines('a = 1\nworkload = [\n {name = "a"},\n {name = "b"},\n]\n', "workload", 2) == (2, 2)


# Patterns


def workload(name: str, target: str = "host", rule: str = "matmul", tags: tuple[str, ...] = ()) -> Workload:
    return Workload(name, target, rule, (), "auto", 1, None, tags, 1)


ENTRIES = (
    workload("qkv[m=1]", tags=("hot",)),
    workload("qkv[m=16]"),
    workload("qkv[m=16]", "gpu"),
    workload("gate", rule="gemv"),
    workload("gate.m", "gpu", "gemv"),
)


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        ([], [0, 1, 2, 3, 4]),
        (["qkv"], [0, 1, 2]),
        (["qkv[m=16]"], [1, 2]),
        (["qkv[m=*]@host"], [0, 1]),
        (["qkv@gpu"], [2]),
        (["qkv[m=1?]"], [1, 2]),
        (["[m=1]*", "gate"], None),
        (["gate"], [3]),
        (["gate.m"], [4]),
        (["gate*"], [3, 4]),
        (["*@gpu"], [2, 4]),
        (["rule:gemv"], [3, 4]),
        (["rule:ge*@gpu"], [4]),
        (["tag:hot", "gate"], [0, 3]),
        (["g", "*"], None),
    ],
)
def test_patterns_select(patterns: list[str], chosen: list[int] | None) -> None:
    if chosen is None:
        with pytest.raises(PatternError, match="no entry matches") as caught:
            select(ENTRIES, patterns)
        assert caught.value.exit_code == ExitCode.NO_MATCH
    else:
        assert select(ENTRIES, patterns) == tuple(ENTRIES[position] for position in chosen)


def test_a_pattern_without_match_names_the_nearest(golden: Callable[[str, str], None]) -> None:
    patterns = ["qvk", "gat@gpu", "gta@hots", "gate@gpu", "rule:gemm", "tag:hut", "nothing_like_it"]
    with pytest.raises(PatternError, match="qvk") as caught:
        select(ENTRIES, patterns)
    golden("pattern", f"{caught.value}\n")


# Mistakes


def rule_file(body: str, methods: str = METHODS, decorator: str = "@dataclass(frozen=True)") -> str:
    return f"from dataclasses import dataclass\nfrom kerneldecl.rule import Rule\n{decorator}\nclass Broken(Rule):\n    {body}\n{methods}"


WRONG: dict[str, str] = {
    "unknown_key": 'artefact = 1\nedition = 1\n[artifact]\nname = "a"\nversion = "1"\nauthor = "me"\n[toolchain]\ntmv = "1"\n'
    '[target.host]\narch = "host"\nmodel = "x"\n[defaults]\ntopk = 1\n' + table("a", m="1", n="1", lyout='"nn"', tag='["x"]', zzz="1"),
    "unknown_name": HEAD
    + '[target.gpu]\narch = "hots"\n[defaults]\ntargets = ["hosts"]\npolicy = "atuo"\n'
    + table("a", "gmem", m="1", n="1")
    + table("b", m="1", n="1", targets='["hsot"]', policy='"greedyy"', layout='"nq"', epilogue='["bias", "rleu"]'),
    "wrong_type": 'edition = 1\n[artifact]\nname = "a b"\nversion = 1\n[toolchain]\ntvm = 0.27\n[target.host]\narch = 1\n'
    '[target."a b"]\narch = "host"\n[defaults]\ntargets = "host"\ntop_k = 0\ntolerance = "1"\n'
    + table("a b", m='"5"', n="1.0", fast="1", eps='"x"', layout="3", epilogue='"bias"', shape="[1, true]", pad="[1, 2, 3]")
    + table("b", m="true", n="[1, '2']", shape="[[1, 2], ['3']]", eps="inf", source="1", pad="{a = 1}", fast="1979-05-27")
    + table("c", m="1", n="1", top_k="true", tolerance="nan", tags='["a", "a"]', policy="1", targets="[]", generation="-1", cases="[]"),
    "extent": HEAD + table("a", m="0", n="-1", pad="-1", shape="[4, 0]") + table("b", m="[1, 0, -2]", n="[]"),
    "missing": 'edition = 1\n[artifact]\nname = "a"\n[target.host]\n[[workload]]\nname = "a"\nm = 1\n'
    '[[workload]]\nrule = "gemm"\nm = 1\n' + table("c", cases="[{m = 1, n = 2}, {m = 2}]"),
    "missing_tables": "edition = 1\n",
    "duplicate": HEAD
    + table("a", m="1", n="1")
    + table("b", m="[16, 2, 16]", n="1")
    + table("a", m="[1, 2]", n="1")
    + table("c", cases="[{m = 1, n = 2}, {m = 1, n = 2}]")
    + table("a", "no_such_rule"),
    "too_many": HEAD + table("big", m=str(list(range(1, 1001))), n=str(list(range(1, 1001))), fast="[true, false]"),
    "cases": HEAD
    + table("a", m="1", cases="[{m = 1, n = 2}, {n = [1, 2]}, {n = 3, lyout = 'nn'}, {n = 0}]")
    + table("b", cases="[{}, 1]")
    + table("c", n="1", cases="[{m = 1, name = 'x'}]"),
    "rule_problems": HEAD
    + table("a", m="1", n="1", fast="true", eps="[0, 1]")
    + table("b", m="1", n="1", layout='["nn", "tt"]', eps="0.0")
    + table("c", m="2", n="1", layout='"tt"', eps="0.0"),
    "rows": HEAD
    + table("a", m="{ upto = 64 }", n="1")
    + table("b", m="{ upto = 64, tuned = [16, 1] }", n="1")
    + table("c", m="{ upto = 64, tuned = [1, 128] }", n="1")
    + table("d", m="{ upto = 64, tuned = [1] }", n="1")
    + table("e", m="{ upto = 1, tuned = [1] }", n="{ upto = 64, tuned = [16] }")
    + table("f", m="{ upto = 64, tuned = [0, 16] }", n="1", layout="{ upto = 64, tuned = [16] }")
    + table("g", m="1", n="1", shape="[{ upto = 64, tuned = [16, 16] }, 4]")
    + table("h", m="{ upto = 1_000_000_000_000, tuned = [16] }", n="1")
    + table("i", m="{ upto = 31, tuned = [1, 16] }", n="1", dispatch='"library"'),
    "workspace_file": HEAD
    + table("a", m="1", n="1", source='"ir/b.json"')
    + table("b", m="1", n="1", source='["ir/a.json", "../secret", "/etc/passwd"]')
    + table("c", m="1", n="1", source='"ir"')
    + table("d", m="1", n="1", source='["ir/a b"]'),
    "not_tables": 'edition = 1\nartifact = "a"\ntoolchain = 1\ntarget = "host"\ndefaults = []\nworkload = "a"\n',
    "not_tables_inside": 'edition = 1\n[artifact]\nname = "a"\nversion = "1"\n[target]\nhost = "x86"\n[workload]\nname = "a"\n',
    "mistyped_workload": HEAD + "[[workloads]]\nname = 'a'\n",
    "edition_missing": '[artifact]\nname = "a"\n',
    "edition_unknown": '# new\nedition = 2\nsomething = "else"\n',
    "edition_type": 'edition = "1"\n',
    "not_toml": HEAD + "[[workload]]\nname = \n",
    "empty": "# nothing yet\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_text_of_mistakes(workspace: Path, golden: Callable[[str, str], None], name: str) -> None:
    (workspace / "workloads.toml").write_text(WRONG[name], encoding="utf-8")
    before = sorted(workspace.rglob("*"))
    golden(f"declare_{name}", mistakes(workspace))
    assert sorted(workspace.rglob("*")) == before


def test_text_of_files_that_cannot_be_read(workspace: Path, golden: Callable[[str, str], None]) -> None:
    texts = [mistakes(workspace), mistakes(workspace, HEAD.encode() + b"# caf\xe9\n")]
    (workspace / "workloads.toml").mkdir()
    golden("declare_unreadable", "".join([*texts, mistakes(workspace)]))


BROKEN_RULES = {
    "raises": "import json\n\nraise RuntimeError('two\\nlines')\n",
    "exits": "import sys\nsys.exit()\n",
    "syntax": "\n\nbroken = = 1\n",
    "missing_module": "from ._no_such_neighbour import x\n",
    "missing_class": "class Brokn: ...\n",
    "not_a_rule": "class Broken: ...\n",
    "not_a_dataclass": rule_file("m: int", decorator=""),
    "not_frozen": rule_file("m: int", decorator="@dataclass"),
    "missing_method": rule_file("m: int", methods=METHODS.replace("flops", "flop")),
    "reserved": rule_file("tags: int = 1"),
    "default": rule_file("m: int = None"),
    "optional": rule_file("m: int | None = None"),
    "annotation": rule_file("m: 'Extend' = 1"),
    "not_a_value": rule_file("m: Rule"),
}


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_text_of_broken_rules(workspace: Path, golden: Callable[[str, str], None], name: str) -> None:
    (workspace / "rules" / "broken.py").write_text(BROKEN_RULES[name], encoding="utf-8")
    text = HEAD + table("a", "broken", m="1") + table("b", "broken", m="2") + table("c", m="0", n="1")
    golden(f"declare_rule_{name}", mistakes(workspace, text.encode()))


def test_a_broken_rule_that_no_entry_uses_is_no_mistake(workspace: Path) -> None:
    (workspace / "rules" / "broken.py").write_text("1 / 0", encoding="utf-8")
    assert declared(workspace, table("a", m="1", n="1")).workloads


def test_mistakes_come_in_order_of_their_lines(workspace: Path) -> None:
    with pytest.raises(DeclarationError, match=r"^workloads\.toml:\d+: ") as caught:
        declare(workspace, WRONG["wrong_type"].encode())
    lines = [problem.line for problem in caught.value.problems]
    assert lines == sorted(lines)
    assert all(line > 0 for line in lines)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from([*"mnx", "name", "rule", "layout", "epilogue", "pad", "source", "cases", "targets", "top_k", "tags", "policy"]),
        st.recursive(
            st.integers() | st.booleans() | st.floats() | st.sampled_from(["gemm", "nn", "bias", "host", "auto", "", "a b"]),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["m", "n", "x", ""]), inner, max_size=2),
            max_leaves=6,
        ),
    )
)
def test_any_table_either_expands_or_says_what_is_wrong(workspace: Path, entry: dict[str, object]) -> None:
    scope = scope_of(workspace, parse(HEAD.encode()))
    expansion = expand_table(entry, scope)
    assert bool(expansion.workloads) != bool(expansion.findings)


# What is imported


def test_declaring_imports_no_tvm_and_finding_plugins_imports_neither_pydantic_nor_numpy(write_files: Write) -> None:
    workspace = write_files({**OWN_PLUGINS, "workloads.toml": HEAD + table("a", m="1", n="1")})
    code = (
        "import sys; from pathlib import Path; from kerneldecl import errors\n"
        "from kerneldecl.plugins.digest import plugin_files; from kerneldecl.plugins.find import plugin_names\n"
        "import kerneldecl.declare.select, kerneldecl.diagnostics.line_numbers, kerneldecl.toolchain.versions\n"
        f"root = Path({str(workspace)!r})\n"
        "plugin_files('rules', root, 'gemm'), plugin_names('archs', root)\n"
        "early = {'pydantic', 'numpy', 'tomli', 'tvm', 'rich'} & set(sys.modules)\n"
        "from kerneldecl.declare.document import declare\n"
        "declare(root)\n"
        "print(early, {'tvm', 'tvm_ffi', 'rich'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set() set()\n"
