"""Owns the tests of canonical TensorIR: equal and different computations, and generated code that is always the same bytes.

Knows nothing of rules' mathematics or of schedules' speed.
"""

from __future__ import annotations

import hashlib
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tvm
from support.spaces import clean_environment
from tvm.script import from_source

from kerneldecl.compiler import canonical
from kerneldecl.signature import Arg, Signature

PRODUCT = """
@T.prim_func(s_tir=True)
def {name}({a}: T.Buffer(({m}, 16), "{dtype}"), B: T.Buffer((16, 8), "{dtype}"), C: T.Buffer(({m}, 8), "{dtype}")):
    T.func_attr({{{attrs}"tirx.noalias": True}})
    # {comment}
    for {i}, j, k in T.grid({m}, 8, 16):
        with T.sblock("{block}"):
            v{i}, vj, vk = T.axis.remap("SSR", [{i}, j, k])
            with T.init():
                C[v{i}, vj] = {dtype_call}(0)
            C[v{i}, vj] = C[v{i}, vj] {op} {a}[v{i}, vk] {inner} B[vk, vj]
"""
PLAIN = {
    "name": "main",
    "a": "A",
    "m": 32,
    "dtype": "float32",
    "dtype_call": "T.float32",
    "attrs": "",
    "comment": "",
    "i": "i",
    "block": "C",
    "op": "+",
    "inner": "*",
}


def gemm(**fields: Any) -> Any:
    """Return a GEMM as its author may have written it."""
    return from_source(PRODUCT.format(**{**PLAIN, **fields}))


def digest(func: Any) -> str:
    return canonical.module_digest(canonical.canonical_module(func))


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "gemm"},
        {"a": "lhs"},
        {"i": "row"},
        {"block": "gemm"},
        {"comment": "another author's words"},
        {"attrs": '"op_pattern": 4, '},
        {"attrs": '"global_symbol": "gemm", "tirx.is_scheduled": True, '},
        {"a": "v0", "i": "v1", "block": "v2"},
        {"a": "T_A", "i": "for_", "block": "main"},
    ],
)
def test_names_attributes_and_comments_make_no_other_computation(fields: dict[str, str]) -> None:
    assert digest(gemm(**fields)) == digest(gemm())


@pytest.mark.parametrize(
    "fields",
    [
        {"m": 33},
        {"dtype": "float64", "dtype_call": "T.float64"},
        {"op": "-"},
        {"inner": "+"},
    ],
)
def test_dtypes_extents_and_operations_make_another_computation(fields: dict[str, Any]) -> None:
    assert digest(gemm(**fields)) != digest(gemm())


def test_which_operand_is_read_makes_another_computation() -> None:
    """Renaming must not make two functions equal that read differently."""
    source = PRODUCT.format(**{**PLAIN, "m": 8})
    other_operand = source.replace("A[vi, vk] * B[vk, vj]", "A[vi, vk] * A[vj, vk]")
    other_index = source.replace("A[vi, vk]", "A[vi, vj]")
    assert len({digest(from_source(text)) for text in (source, other_operand, other_index)}) == 3


def test_the_text_is_that_of_a_function_and_canonical_modules_are_fixed_points() -> None:
    mod = canonical.canonical_module(gemm(name="gemm", a="lhs"))
    again = canonical.canonical_module(mod["main"])
    assert canonical.canonical_text(mod) == canonical.canonical_text(again)
    assert "gemm" not in canonical.canonical_text(mod)
    assert "lhs" not in canonical.canonical_text(mod)


def test_a_function_survives_the_trip_through_json() -> None:
    mod = canonical.canonical_module(gemm())
    assert canonical.module_digest(canonical.load(canonical.save(mod))) == canonical.module_digest(mod)


LOWER = """
import sys
sys.modules["torch"] = None  # which tvm_ffi imports where it is installed: it takes seconds
from pathlib import Path
from kerneldecl.compiler import canonical, cpu
from kerneldecl.hardware.host import detect
from kerneldecl.store.keys import digest
from kerneldecl.plugins.load import load_rule
cases = [
    ("matmul", {"m": 16, "n": 24, "k": 8, "epilogue": ("bias", "gelu")}),
    ("softmax", {"shape": (8, 16)}),
    ("conv2d", {"n": 1, "h": 6, "w": 6, "c": 4, "f": 4, "kh": 3, "kw": 3, "padding": 1}),
]
for name, attrs in cases:
    mod = canonical.lower(load_rule(Path.cwd(), name)(**attrs))
    print(canonical.module_digest(mod), digest(cpu.compile_object(mod, detect(), "kd_kernel")))
"""


def test_computations_and_objects_are_the_same_in_every_process() -> None:
    def lines(seed: str) -> list[str]:
        environment = {**clean_environment(), "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", LOWER], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    first = lines("0")
    assert first == lines("4242")
    assert len(set(first)) == 3


def test_digests_are_sha256_of_the_text() -> None:
    mod = canonical.canonical_module(gemm())
    assert canonical.module_digest(mod) == hashlib.sha256(canonical.canonical_text(mod).encode()).hexdigest()


def test_scalars_and_dynamic_extents_are_refused() -> None:
    dynamic = from_source(
        """
@T.prim_func(s_tir=True)
def main(a: T.handle, n: T.int64):
    A = T.match_buffer(a, (n,), "float32")
    for i in range(n):
        with T.sblock("A"):
            vi = T.axis.spatial(n, i)
            A[vi] = T.float32(0)
"""
    )
    with pytest.raises((TypeError, ValueError)):
        canonical.signature_of(canonical.canonical_module(dynamic)["main"])
    assert isinstance(dynamic, tvm.tirx.PrimFunc)


class Product:
    """A rule whose signature is given, with a GEMM for its computation."""

    def __init__(self, *args: tuple[tuple[int, ...], str]) -> None:
        named = [Arg(f"X{at}", *arg) for at, arg in enumerate(args)]
        self._signature = Signature(tuple(named[:-1]), tuple(named[-1:]))

    def lower(self) -> Any:
        return gemm()

    def signature(self) -> Signature:
        return self._signature


class Script(Product):
    """The same rule, whose computation a file of TVM's script holds."""

    def __init__(self, file: Path) -> None:
        super().__init__(A, B, C)
        self._file = file

    def lower(self) -> Any:
        self._file.parent.mkdir()
        self._file.write_text(f"from tvm.script import tirx as T\n{PRODUCT.format(**PLAIN)}", encoding="utf-8")
        return runpy.run_path(str(self._file))["main"]


A, B, C = ((32, 16), "float32"), ((16, 8), "float32"), ((32, 8), "float32")


def test_a_computation_has_the_arguments_that_its_signature_says() -> None:
    assert canonical.module_digest(canonical.lower(Product(A, B, C))) == digest(gemm())  # type: ignore[arg-type]  # as a Rule


@pytest.mark.parametrize(
    "args",
    [(B, A, C), (A, B, ((32, 8), "float16")), (A, B, ((8, 32), "float32")), (A, B, ((256,), "float32")), (A, C), (A, B, C, C)],
    ids=["order", "dtype", "layout", "rank", "one too few", "one too many"],
)
def test_a_signature_that_says_otherwise_than_the_computation_is_refused(args: tuple[tuple[tuple[int, ...], str], ...]) -> None:
    """Kernels would be called with other arguments than they are made for."""
    with pytest.raises(ValueError, match=r"lower\(\) gives arguments .*, but signature\(\) says"):
        canonical.lower(Product(*args))  # type: ignore[arg-type]


def test_a_computation_is_saved_alike_wherever_its_script_is(tmp_path: Path) -> None:
    """Databases hold it, and two checkouts build one artifact."""
    here, there = (canonical.lower(Script(tmp_path / folder / "gemm.py")) for folder in ("here", "there"))  # type: ignore[arg-type]  # as a Rule
    assert "here" in tvm.ir.save_json(Script(tmp_path / "here again" / "gemm.py").lower()), "else this test cannot fail"
    assert canonical.save(here) == canonical.save(there)
    tvm.ir.assert_structural_equal(here["main"], gemm().with_attr({"global_symbol": "main", "s_tir": True}))


def test_schedules_leave_the_function_as_it_was() -> None:
    func = gemm()
    before = func.script()
    for _ in range(2):
        schedule = tvm.s_tir.Schedule(canonical.private_module(func))
        schedule.split(schedule.get_loops(schedule.get_sblock("C"))[0], [None, 4])
        assert func.script() == before
