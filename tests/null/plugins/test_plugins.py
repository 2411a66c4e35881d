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

import kerneldecl
from kerneldecl.errors import DeclarationError, ExitCode
from kerneldecl.model import Cpu
from kerneldecl.plugins import digest, find
from kerneldecl.plugins.check import attribute_fields
from kerneldecl.plugins.digest import files_digest, path_in_digests, plugin_files
from kerneldecl.plugins.find import plugin_file, plugin_folders, plugin_names, shadowed_file
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import is_tuner, policies_behind, standard_order
from kerneldecl.rule import Rule

Write = Callable[[Mapping[str, str]], Path]
STANDARD = Path(kerneldecl.__file__).parent

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
    return load_rule(root, "twice_sum")(n=n).flops()  # type: ignore[call-arg]


def text_of(error: DeclarationError, root: Path) -> str:
    assert error.exit_code == ExitCode.USAGE
    return f"{error}\n".replace(str(root), "WORKSPACE")


# Finding


def test_the_workspace_adds_to_the_standard_plugins(workspace: Path) -> None:
    names = plugin_names("rules", workspace)
    assert {"twice_sum", "matmul"} <= set(names)
    assert list(names) == sorted(set(names))
    assert not any(name.startswith("_") for name in names)
    assert shadowed_file("rules", workspace, "twice_sum") is None
    assert plugin_file("rules", workspace, "matmul").parent == plugin_folders("rules", workspace)[1]


def test_a_workspace_rule_shadows_a_standard_one(write_files: Write) -> None:
    root = write_files({"rules/matmul.py": RULE.replace("TwiceSum", "Matmul"), "rules/_shared.py": "FACTOR = 3\n"})
    assert plugin_file("rules", root, "matmul") == root / "rules" / "matmul.py"
    standard = shadowed_file("rules", root, "matmul")
    assert standard is not None
    assert standard == plugin_folders("rules", root)[1] / "matmul.py"
    assert [field.name for field in attribute_fields(load_rule(root, "matmul"))] == ["n"]


def test_a_checkout_of_kerneldecl_is_its_own_workspace_once() -> None:
    assert plugin_folders("rules", STANDARD.parent) == (STANDARD.parent / "rules",)


def test_rules_inside_the_package_are_the_standard_ones_of_a_wheel(write_files: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_files({"site/kerneldecl/rules/twice_sum.py": RULE, "site/kerneldecl/rules/_shared.py": "FACTOR = 5\n"})
    monkeypatch.setattr(find, "PACKAGE", root / "site" / "kerneldecl")
    assert plugin_names("rules", root) == ("twice_sum",)
    assert flops(root, 1) == 5


def test_what_is_no_identifier_is_no_rule_but_may_be_an_arch(write_files: Write) -> None:
    root = write_files({"rules/my-rule.py": "", "archs/my-cpu.toml": "", "archs/_draft.toml": "", "rules/notes.txt": ""})
    assert "my-rule" not in plugin_names("rules", root)
    assert {"my-cpu", "host", "x86-64-v3"} <= set(plugin_names("archs", root))
    assert "_draft" not in plugin_names("archs", root)


def test_text_of_unknown_plugins(write_files: Write, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]) -> None:
    root = write_files({"rules/twice_sum.py": RULE, "rules/_shared.py": "", "policies/auto.py": "", "archs/small.toml": ""})
    monkeypatch.setattr(find, "PACKAGE", root / "none" / "kerneldecl")
    texts = []
    for kind, name in (("rules", "twicesum"), ("rules", "_shared"), ("policies", "manual"), ("templates", "tile"), ("archs", "smal")):
        with pytest.raises(DeclarationError, match=name) as caught:
            plugin_file(kind, root, name)  # type: ignore[arg-type]
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


def test_a_mistake_in_a_folder_of_neighbours_is_blamed_on_its_line(write_files: Write) -> None:
    root = write_files({"rules/twice_sum.py": RULE.replace("._shared", ".near.facts"), "rules/near/facts.py": "FACTOR = 2\n1 / 0\n"})
    with pytest.raises(DeclarationError, match=r"rules/near/facts\.py:2: rule twice_sum fails to import: ZeroDivisionError"):
        flops(root, 1)


def test_a_neighbour_of_standard_rules_is_replaced_alone(write_files: Write) -> None:
    """`rules/shared` is a namespace package: the workspace's folder adds to the standard one."""
    root = write_files({"rules/shared/axes.py": "def positions(axes, rank):\n    return (0,)\naxes_problems = None\n"})
    reduce = load_rule(root, "reduce")
    assert sys.modules[reduce.__module__].positions([1], 2) == (0,)
    assert sys.modules[reduce.__module__].accum_dtype("float16") == "float32"


def test_an_unchanged_rule_is_the_same_class_and_two_workspaces_do_not_mix(workspace: Path, tmp_path: Path) -> None:
    rule = load_rule(workspace, "twice_sum")
    assert load_rule(workspace, "twice_sum") is rule
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
    assert load_module("policies", root, "mine").TILES == (4, 8)
    assert load_module("templates", root, "mine").X == 1
    assert load_module("policies", root, "auto").__name__ == "kerneldecl.policies.auto"


def test_a_failure_outside_the_workspace_is_blamed_on_the_line_that_led_to_it(write_files: Write) -> None:
    root = write_files({"policies/mine.py": "import json\n\n\ndef start():\n    return json.loads(None)\n\n\nstart()\n"})
    with pytest.raises(DeclarationError, match="policy mine fails to import: TypeError: ") as caught:
        load_module("policies", root, "mine")
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
    first, *rest = plugin_files("rules", root, "first")
    assert first == root / "rules/first.py"
    assert rest == sorted(rest)
    assert {str(file.relative_to(root)) for file in (first, *rest) if file.is_relative_to(root)} == {
        *("rules/first.py", "rules/_a.py", "rules/_b/__init__.py", "rules/_b/c.py", "rules/_d.py"),
        *("shapes/__init__.py", "shapes/square.py", "other.py"),
    }
    # Of kerneldecl, what every rule inherits; not the values that it is given, which choose nothing.
    assert [file for file in rest if not file.is_relative_to(root)] == [STANDARD / name for name in ("arrays.py", "lazy.py", "rule.py")]


def test_relative_imports_in_a_nested_folder_are_followed_from_there(write_files: Write) -> None:
    root = write_files(
        {
            "policies/mine.py": "from .near.model import A\n",
            "policies/near/model.py": "from .facts import B\nfrom ..far.facts import C\n",
            "policies/near/facts.py": "B = 1\n",
            "policies/far/facts.py": "C = 1\n",
            "policies/facts.py": "",
        }
    )
    found = [str(file.relative_to(root / "policies")) for file in plugin_files("policies", root, "mine")]
    assert found == ["mine.py", "far/facts.py", "near/facts.py", "near/model.py"]


def test_two_files_of_one_name_in_two_folders_stand_in_a_digest_under_their_own_paths(write_files: Write) -> None:
    files = ("policies/near/facts.py", "policies/far/facts.py", "kernels/facts.py")
    root = write_files(dict.fromkeys(files, ""))
    assert [path_in_digests(root / file, root) for file in files] == list(files)
    assert path_in_digests(STANDARD / "policies" / "auto.py", root) == "policies/auto.py"


def test_a_shadowed_neighbour_is_the_one_that_counts(write_files: Write) -> None:
    root = write_files({"rules/shared/precision.py": ""})
    files = plugin_files("rules", root, "matmul")
    assert files[0] == plugin_folders("rules", root)[1] / "matmul.py"
    assert root / "rules" / "shared" / "precision.py" in files


def test_a_workspace_policy_is_made_of_the_standard_files_that_it_imports(write_files: Write) -> None:
    root = write_files({"policies/mine.py": "import kerneldecl.policies.auto\nfrom kerneldecl import model\n"})
    assert STANDARD / "policies" / "auto.py" in plugin_files("policies", root, "mine")
    assert STANDARD / "model.py" not in plugin_files("policies", root, "mine")


def test_the_analyses_that_decide_what_a_plugin_sees_are_files_behind_it(write_files: Write) -> None:
    mine = "from kerneldecl.analysis.contraction import Contraction\nfrom kerneldecl.hardware import host\n"
    root = write_files({"policies/mine.py": mine, "analysis/contraction.py": ""})
    contraction = STANDARD / "analysis" / "contraction.py"
    facts = STANDARD / "analysis" / "tensor_cores.py"  # which contraction.py imports
    package = STANDARD / "analysis" / "__init__.py"
    assert plugin_files("policies", root, "mine") == (root / "policies" / "mine.py", package, contraction, facts)
    assert path_in_digests(contraction, root) == path_in_digests(contraction, STANDARD.parent) == "analysis/contraction.py"
    for kind, name in (("policies", "gpu_matmul"), ("templates", "gpu_matmul_tc"), ("templates", "wgmma_matmul")):
        assert contraction in plugin_files(kind, root, name)  # type: ignore[arg-type]


def test_an_edited_analysis_is_another_policy(write_files: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_files({"policies/mine.py": "from kerneldecl.analysis import sizes\n", "site/kerneldecl/analysis/sizes.py": "A = 1\n"})
    monkeypatch.setattr(digest, "PACKAGE", root / "site" / "kerneldecl")
    files = plugin_files("policies", root, "mine")
    before = files_digest(root, files)
    files[1].write_text("A = 2\n", encoding="utf-8")
    assert files_digest(root, files) != before


def test_the_instructions_that_a_template_uses_are_files_behind_it() -> None:
    assert STANDARD / "compiler" / "intrinsics" / "mma.py" in plugin_files("templates", STANDARD, "gpu_matmul_tc")


def test_a_comment_in_an_imported_file_leaves_the_digest(write_files: Write) -> None:
    root = write_files({"policies/mine.py": "from .near import A\n", "policies/near.py": "A = 1\n"})
    files = plugin_files("policies", root, "mine")
    before = files_digest(root, files)
    files[1].write_text("A = 1  # one\n", encoding="utf-8")
    assert files_digest(root, files) == before
    files[1].write_text("A = 2  # one\n", encoding="utf-8")
    assert files_digest(root, files) != before


def test_an_arch_is_its_file(write_files: Write) -> None:
    assert plugin_files("archs", write_files({}), "x86-64-v3") == (STANDARD / "archs" / "x86-64-v3.toml",)


# Archs


@pytest.mark.parametrize(("name", "vector_bytes"), [("x86-64-v3", 32), ("x86-64-v4", 64)])
def test_standard_archs(tmp_path: Path, name: str, vector_bytes: int) -> None:
    arch = load_arch(tmp_path, name)
    assert (arch.name, arch.kind, arch.model, arch.is_detected) == (name, "cpu", "", False)
    assert dict(arch.tvm_target)["mcpu"] == name
    assert dict(arch.tvm_target)["num-cores"] == arch.cpu.cores == 4
    assert arch.cpu.vector_bytes == vector_bytes
    assert all(type(getattr(arch.cpu, field.name)).__name__ == field.type for field in fields(Cpu))


def test_host_is_detected(tmp_path: Path) -> None:
    assert load_arch(tmp_path, "host").is_detected


def test_an_arch_of_the_workspace_is_read_as_written(write_files: Write) -> None:
    text = (STANDARD / "archs" / "x86-64-v3.toml").read_text(encoding="utf-8")
    root = write_files({"archs/big.toml": text.replace("clock_hz = 3.0e9", "clock_hz = 4000000000").replace('model = ""', 'model = "Big"')})
    standard, big = load_arch(root, "x86-64-v3"), load_arch(root, "big")
    assert big == replace(standard, name="big", model="Big", cpu=replace(standard.cpu, clock_hz=4e9))
    assert type(big.cpu.clock_hz) is float


def test_text_of_wrong_archs(write_files: Write, golden: Callable[[str, str], None]) -> None:
    right = (STANDARD / "archs" / "x86-64-v4.toml").read_text(encoding="utf-8")
    lines = [
        line.replace("cores = 4", "cores = 0").replace("l2_bytes =", "l2_byte =").replace("clock_hz = 2.6e9", 'clock_hz = "2.6"')
        for line in right.replace("l1d_bytes = 32768", "l1d_bytes = 32.5")
        .replace('kind = "cpu"', 'kind = "cpu"\nvendor = "x"')
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
            load_arch(root, name)
        texts.append(text_of(caught.value, root))
    golden("plugins_archs", "".join(texts))


def test_a_workspace_policy_that_names_its_place_is_asked_by_auto(write_files: Write) -> None:
    body = "TEMPLATES = ()\n\n\ndef propose(space, arch, top_k):\n    return ()\n"
    root = write_files({"policies/mine.py": f'AUTO = {{"cpu": 11}}\n{body}', "policies/unasked.py": body, "policies/broken.py": "1 +\n"})
    standard = standard_order("cpu")
    behind = standard.index("cpu_matmul") + 1  # whose place is 10
    assert policies_behind(root, "auto", "cpu") == (*standard[:behind], "mine", *standard[behind:])
    assert policies_behind(root, "auto", "cuda") == standard_order("cuda")
    assert policies_behind(root, "unasked", "cpu") == ("unasked",)


def test_every_standard_policy_names_its_place_or_is_asked_by_name_alone() -> None:
    asked = {*standard_order("cpu"), *standard_order("cuda")}
    by_name = {"auto", "default", "traced"}
    by_name |= {"wgmma_conv2d", "wgmma_conv2d_transpose", "wgmma_matmul", "wgmma_window"}  # gpu_matmul asks them
    by_name |= {"gpu_matmul_packed", "wgmma_matmul_quantized"}  # gpu_matmul_quantized asks them
    names = {*plugin_names("policies", STANDARD)}
    tuners = {name for name in names if is_tuner(STANDARD, name)}
    assert names == asked | by_name | tuners
    assert not tuners & (asked | by_name)
