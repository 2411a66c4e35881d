"""Owns the tests of plug-ins: which file is found, what it is made of, when it is loaded anew, what is wrong with an arch.

Knows nothing of declarations.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path

import pytest

from kerneldecl import plugins
from kerneldecl.errors import DeclarationError, ExitCode
from kerneldecl.model import Cpu
from kerneldecl.rule import Rule

Write = Callable[[Mapping[str, str]], Path]
STANDARD = Path(plugins.__file__).parent

RULE = """\
from dataclasses import dataclass
from kerneldecl.rule import Extent, Rule
from ._shared import FACTOR


@dataclass(frozen=True, kw_only=True)
class TwiceSum(Rule):
    n: Extent

    def signature(self): ...
    def lower(self): ...
    def reference(self, *inputs): ...
    def flops(self):
        return FACTOR * self.n
"""


@pytest.fixture
def workspace(write_files: Write) -> Path:
    return write_files({"rules/twice_sum.py": RULE, "rules/_shared.py": "FACTOR = 2\n"})


def flops(root: Path, n: int) -> int:
    return plugins.load_rule(root, "twice_sum")(n=n).flops()  # type: ignore[call-arg]


def text_of(error: DeclarationError, root: Path) -> str:
    assert error.exit_code == ExitCode.USAGE
    return f"{error}\n".replace(str(root), "WORKSPACE")


# Finding


def test_the_workspace_adds_to_the_standard_plugins(workspace: Path) -> None:
    names = plugins.rule_names(workspace)
    assert {"twice_sum", "matmul"} <= set(names)
    assert list(names) == sorted(set(names))
    assert not any(name.startswith("_") for name in names)
    assert plugins.shadowed(workspace, "twice_sum") is None
    assert plugins.rule_file(workspace, "matmul").parent == plugins.rules_folders(workspace)[1]


def test_a_workspace_rule_shadows_a_standard_one(write_files: Write) -> None:
    root = write_files({"rules/matmul.py": RULE.replace("TwiceSum", "Matmul"), "rules/_shared.py": "FACTOR = 3\n"})
    assert plugins.rule_file(root, "matmul") == root / "rules" / "matmul.py"
    standard = plugins.shadowed(root, "matmul")
    assert standard is not None
    assert standard == plugins.rules_folders(root)[1] / "matmul.py"
    assert [field.name for field in plugins.fields(plugins.load_rule(root, "matmul"))] == ["n"]


def test_a_checkout_of_kerneldecl_is_its_own_workspace_once() -> None:
    assert plugins.rules_folders(STANDARD.parent) == (STANDARD.parent / "rules",)


def test_rules_inside_the_package_are_the_standard_ones_of_a_wheel(write_files: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_files({"site/kerneldecl/rules/twice_sum.py": RULE, "site/kerneldecl/rules/_shared.py": "FACTOR = 5\n"})
    monkeypatch.setattr(plugins, "_PACKAGE", root / "site" / "kerneldecl")
    assert plugins.rule_names(root) == ("twice_sum",)
    assert flops(root, 1) == 5


def test_what_is_no_identifier_is_no_rule_but_may_be_an_arch(write_files: Write) -> None:
    root = write_files({"rules/my-rule.py": "", "archs/my-cpu.toml": "", "archs/_draft.toml": "", "rules/notes.txt": ""})
    assert "my-rule" not in plugins.rule_names(root)
    assert {"my-cpu", "host", "x86-64-v3"} <= set(plugins.plugin_names("archs", root))
    assert "_draft" not in plugins.plugin_names("archs", root)


def test_text_of_unknown_plugins(write_files: Write, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]) -> None:
    root = write_files({"rules/twice_sum.py": RULE, "rules/_shared.py": "", "policies/auto.py": "", "archs/small.toml": ""})
    monkeypatch.setattr(plugins, "_PACKAGE", root / "none" / "kerneldecl")
    texts = []
    for kind, name in (("rules", "twicesum"), ("rules", "_shared"), ("policies", "manual"), ("templates", "tile"), ("archs", "smal")):
        with pytest.raises(DeclarationError, match=name) as caught:
            plugins.plugin_file(kind, root, name)  # type: ignore[arg-type]
        texts.append(text_of(caught.value, root))
    golden("plugins_unknown", "".join(texts))


# Loading


@pytest.mark.parametrize("edited", ["twice_sum", "_shared"])
def test_an_edited_rule_is_loaded_anew_even_where_size_and_time_are_the_same(workspace: Path, edited: str) -> None:
    assert flops(workspace, 10) == 20
    file = workspace / "rules" / f"{edited}.py"
    before = file.stat()
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("FACTOR * ", "FACTOR + ").replace("= 2", "= 7"), encoding="utf-8")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert flops(workspace, 10) == {"twice_sum": 12, "_shared": 70}[edited]
    file.write_text(text, encoding="utf-8")
    assert flops(workspace, 10) == 20


def test_a_neighbour_added_within_the_resolution_of_the_clock_is_found(workspace: Path) -> None:
    (workspace / "rules" / "_shared.py").write_text("from ._more import FACTOR\n", encoding="utf-8")
    before = (workspace / "rules").stat()
    with pytest.raises(DeclarationError, match=r"_shared\.py:1: rule twice_sum fails to import: ModuleNotFoundError"):
        flops(workspace, 1)
    (workspace / "rules" / "_more.py").write_text("FACTOR = 4\n", encoding="utf-8")
    os.utime(workspace / "rules", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert flops(workspace, 1) == 4


def test_an_unchanged_rule_is_the_same_class_and_two_workspaces_do_not_mix(workspace: Path, tmp_path: Path) -> None:
    rule = plugins.load_rule(workspace, "twice_sum")
    assert plugins.load_rule(workspace, "twice_sum") is rule
    assert issubclass(rule, Rule)
    other = tmp_path / "other" / "rules"
    other.mkdir(parents=True)
    (other / "twice_sum.py").write_text(RULE.replace("._shared", "._other"), encoding="utf-8")
    (other / "_other.py").write_text("FACTOR = 9\n", encoding="utf-8")
    assert flops(other.parent, 1) == 9
    assert flops(workspace, 1) == 2


def test_loading_writes_nothing_and_leaves_bytecode_of_others_alone(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = sorted(workspace.rglob("*"))
    flops(workspace, 1)
    assert sorted(workspace.rglob("*")) == before
    assert sys.dont_write_bytecode is False


def test_policies_and_templates_are_modules(write_files: Write) -> None:
    root = write_files(
        {"policies/mine.py": "from ._tiles import TILES\n", "policies/_tiles.py": "TILES = (4, 8)\n", "templates/mine.py": "X = 1\n"}
    )
    assert plugins.load_policy(root, "mine").TILES == (4, 8)
    assert plugins.load_template(root, "mine").X == 1
    assert plugins.load_policy(root, "auto").__name__ == "kerneldecl.policies.auto"


def test_a_failure_outside_the_workspace_is_blamed_on_the_line_that_led_to_it(write_files: Write) -> None:
    root = write_files({"policies/mine.py": "import json\n\n\ndef start():\n    return json.loads(None)\n\n\nstart()\n"})
    with pytest.raises(DeclarationError, match="policy mine fails to import: TypeError: ") as caught:
        plugins.load_policy(root, "mine")
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == ("policies/mine.py", 5)
    assert problem.sentence.startswith("policy mine fails to import: TypeError: ")


# What a plug-in is made of


def test_files_of_a_rule_are_all_that_it_imports_from_the_workspace(write_files: Write) -> None:
    root = write_files(
        {
            "rules/first.py": "import math, numpy.linalg\nfrom . import _a\nfrom ._b.c import x\nfrom kerneldecl.rule import Rule\n",
            "rules/_a.py": "def late():\n    from ._d import y\n    import shapes.square\n",
            "rules/_b/__init__.py": "",
            "rules/_b/c.py": "",
            "rules/_d.py": "from . import first\n",
            "rules/_unused.py": "",
            "shapes/__init__.py": "",
            "shapes/square.py": "from other import z\n",
            "shapes/circle.py": "",
            "other.py": "this does not parse",
            "kerneldecl/rule.py": "",
        }
    )
    files = plugins.rule_files(root, "first")
    assert files[0] == root / "rules/first.py"
    assert {str(file.relative_to(root)) for file in files} == {
        *("rules/first.py", "rules/_a.py", "rules/_b/__init__.py", "rules/_b/c.py", "rules/_d.py"),
        *("shapes/__init__.py", "shapes/square.py", "other.py"),
    }
    assert list(files[1:]) == sorted(files[1:])


def test_a_shadowed_neighbour_is_the_one_that_counts(write_files: Write) -> None:
    root = write_files({"rules/_precision.py": ""})
    files = plugins.rule_files(root, "matmul")
    assert files[0] == plugins.rules_folders(root)[1] / "matmul.py"
    assert root / "rules" / "_precision.py" in files


def test_a_workspace_policy_is_made_of_the_standard_files_that_it_imports(write_files: Write) -> None:
    root = write_files({"policies/mine.py": "import kerneldecl.policies.auto\nfrom kerneldecl import model\n"})
    assert STANDARD / "policies" / "auto.py" in plugins.plugin_files("policies", root, "mine")
    assert STANDARD / "model.py" not in plugins.plugin_files("policies", root, "mine")


def test_an_arch_is_its_file(write_files: Write) -> None:
    assert plugins.plugin_files("archs", write_files({}), "x86-64-v3") == (STANDARD / "archs" / "x86-64-v3.toml",)


# Archs


@pytest.mark.parametrize(("name", "vector_bytes"), [("x86-64-v3", 32), ("x86-64-v4", 64)])
def test_standard_archs(tmp_path: Path, name: str, vector_bytes: int) -> None:
    arch = plugins.load_arch(tmp_path, name)
    assert (arch.name, arch.kind, arch.model, arch.is_detected) == (name, "cpu", "", False)
    assert dict(arch.tvm_target)["mcpu"] == name
    assert dict(arch.tvm_target)["num-cores"] == arch.cpu.cores == 4
    assert arch.cpu.vector_bytes == vector_bytes
    assert all(type(getattr(arch.cpu, field.name)).__name__ == field.type for field in fields(Cpu))


def test_host_is_detected(tmp_path: Path) -> None:
    assert plugins.load_arch(tmp_path, "host").is_detected


def test_an_arch_of_the_workspace_is_read_as_written(write_files: Write) -> None:
    text = (STANDARD / "archs" / "x86-64-v3.toml").read_text(encoding="utf-8")
    root = write_files({"archs/big.toml": text.replace("clock_hz = 3.0e9", "clock_hz = 4000000000").replace('model = ""', 'model = "Big"')})
    standard, big = plugins.load_arch(root, "x86-64-v3"), plugins.load_arch(root, "big")
    assert big == replace(standard, name="big", model="Big", cpu=replace(standard.cpu, clock_hz=4e9))
    assert type(big.cpu.clock_hz) is float


def test_text_of_wrong_archs(write_files: Write, golden: Callable[[str, str], None]) -> None:
    right = (STANDARD / "archs" / "x86-64-v4.toml").read_text(encoding="utf-8")
    lines = [
        line.replace("cores = 4", "cores = 0").replace("l2_bytes =", "l2_byte =").replace("clock_hz = 2.6e9", 'clock_hz = "2.6"')
        for line in right.replace("l1d_bytes = 32768", "l1d_bytes = 32.5")
        .replace('kind = "cpu"', 'kind = "npu"\nvendor = "x"')
        .splitlines()
    ]
    wrong = {
        "figures": "\n".join(lines),
        "target": '\nkind = "cpu"\nmodel = 1\ntvm_target = "llvm"\ncpu = 4\n',
        "target_value": right.replace("num-cores = 4", "when = 1979-05-27", 1),
        "toml": "\n\nkind = \n",
    }
    root = write_files({f"archs/{name}.toml": text for name, text in wrong.items()} | {"archs/bytes.toml": ""})
    (root / "archs" / "bytes.toml").write_bytes(b"a = 1\n\xff")
    texts = []
    for name in [*wrong, "bytes"]:
        with pytest.raises(DeclarationError, match=f"archs/{name}.toml") as caught:
            plugins.load_arch(root, name)
        texts.append(text_of(caught.value, root))
    golden("plugins_archs", "".join(texts))
