"""Owns the tests of `specialize` with the real compiler, on the CPU: custom kernels verified, linked, called, replayed.

Knows nothing of GPUs.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tvm
from support.spaces import REAL, Space
from support.thinned import every
from tvm import relax, te

import kerneldecl
from kerneldecl.artifact.load import checked_artifact
from kerneldecl.relax import TIR_PIPELINE, ApplyArtifact, pipeline

HEAD = """\
edition = 1

[artifact]
name = "mini"
version = "0.1.0"

[target.host]
arch = "host"
"""
ENTRY = """
[[workload]]
name = "{name}"
rule = "elementwise"
op = "{op}"
shape = [24, 32]
policy = "{policy}"
top_k = 2
specialize = "own/functions.py"
"""
FUNCTIONS = """\
import tvm
from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def rows(A: T.Buffer((24, 32), "float32"), B: T.Buffer((24, 32), "float32"), C: T.Buffer((24, 32), "float32")):
    for i in T.parallel(24):
        for j in T.vectorized(32):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] * B[vi, vj]


@T.prim_func(s_tir=True)
def half(A: T.Buffer((24, 32), "float32"), B: T.Buffer((24, 32), "float32"), C: T.Buffer((24, 32), "float32")):
    for i, j in T.grid(12, 32):
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj] - B[vi, vj]


def specialize(mod, arch):
    assert arch.the_cpu.cores >= 1
    script = mod["main"].script()
    if " * " in script:
        return rows
    if " - " in script:
        return tvm.IRModule({"half": half})
    return list(schedules(mod))


def schedules(mod):
    for factor in (8, 16):
        sch = tvm.s_tir.Schedule(mod)
        i, j = sch.get_loops(sch.get_child_blocks(sch.get_sblock("root"))[0])
        sch.vectorize(sch.split(j, [None, factor])[1])
        yield sch
"""
FILES = {
    **REAL,
    "workloads.toml": HEAD
    + ENTRY.format(name="function", op="mul", policy="never")
    + ENTRY.format(name="schedule", op="add", policy="never")
    + ENTRY.format(name="wrong", op="sub", policy="plain"),
    "own/functions.py": FUNCTIONS,
    "policies/never.py": REAL["policies/plain.py"].replace('"plain"', '"never"'),
    "templates/never.py": "def apply(mod, params, arch):\n    return None\n",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    space = Space(tmp_path_factory.mktemp("own")).write(FILES)
    told = space.run_here("build", "--jobs", "1").stderr
    assert "wrong@host: specialize(variant=0) of own/functions.py: wrong: relative error" in told
    return space


def entries_of(space: Space) -> dict[str, Any]:
    _, manifest = checked_artifact(space.artifact())
    return {entry["name"]: entry for entry in manifest["entries"]}


def test_a_correct_kernel_wins_and_an_incorrect_one_is_never_selected(built: Space) -> None:
    entries = entries_of(built)
    assert {name: entry["winner"]["template"] for name, entry in entries.items()} == {
        "function": "specialize",
        "schedule": "specialize",
        "wrong": "plain",
    }
    assert all(entry["verdict"]["verified"] for entry in entries.values())
    kernels = kerneldecl.load(built.artifact())
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((24, 32), dtype=np.float32) for _ in range(2))
    for name, want in (("function", a * b), ("schedule", a + b), ("wrong", a - b)):
        out = np.full((24, 32), np.nan, np.float32)
        kernels[name](a, b, out)
        np.testing.assert_allclose(out, want, rtol=1e-6)
    assert "3 of 3 kernels correct" in built.run_here("verify").stdout


def test_a_schedule_is_in_the_database_and_a_traceless_function_in_its_own_file(built: Space) -> None:
    entries, folder = entries_of(built), built.artifact()
    assert [bool(entries[name]["traceless"]) for name in ("function", "schedule", "wrong")] == [True, False, False]
    assert (folder / entries["function"]["traceless"]).is_file()
    assert [path.name for path in (folder / "traceless").iterdir()] == [f"{entries['function']['computation']}.json"]
    records = (folder / "database" / "database_tuning_record.json").read_text(encoding="utf-8").splitlines()
    assert len(records) == 4, "two forms of each computation that has a trace"


def test_the_object_is_rebuilt_from_the_record_and_the_file(built: Space, tmp_path: Any) -> None:
    again = built.copy_of(tmp_path / "again", "own", "cache")
    for path in (again.root / "cache" / "blob").rglob("*"):
        if path.is_file():
            path.unlink()
    assert "3 built" in again.run_here("build", "--jobs", "1").stdout
    assert again.artifact_files() == built.artifact_files()


@pytest.mark.slow
def test_a_model_uses_the_custom_kernel(built: Space) -> None:
    target = tvm.target.Target(checked_artifact(built.artifact())[1]["arch"]["target"])
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((24, 32), "float32")) for name in "xy")
    with builder.function("main", [x, y]):
        with builder.dataflow():
            product = builder.emit_te(lambda a, b: te.compute((24, 32), lambda i, j: a[i, j] * b[i, j]), x, y)
            out = builder.emit_output(relax.op.nn.softmax(product))
        builder.emit_func_output(out)
    mod, apply = builder.get(), ApplyArtifact(built.artifact(), target=target)
    replayed = next(func for name, func in apply(mod).functions.items() if isinstance(func, tvm.tirx.PrimFunc))
    assert "T.parallel(24)" in replayed.script(), "the function, not a schedule of ours"
    passes = pipeline(built.artifact(), target)
    machine = relax.VirtualMachine(relax.build(mod, target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE), tvm.cpu())
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal((24, 32), dtype=np.float32) for _ in range(2))
    powers = np.exp(a * b)
    want = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(machine["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b)).numpy(), want, rtol=1e-5)


UNFIT = {
    "a number": ("return [3]", "TypeError: int is no Schedule, IRModule or PrimFunc"),
    "no function": ("return tvm.IRModule({})", "ValueError: the module holds 0 functions; expected one, a PrimFunc"),
    "other arguments": ("return one", "ValueError: the function takes float32[2]; the workload takes float32[24, 32], "),
}
ONE = '@T.prim_func(s_tir=True)\ndef one(A: T.Buffer((2,), "float32")):\n    A[0] = T.float32(0)\n'


@pytest.mark.slow
@pytest.mark.parametrize("what", every(3, UNFIT))
def test_a_function_that_does_not_fit_the_workload_fails_its_entry(what: str, tmp_path: Any) -> None:
    statement, sentence = UNFIT[what]
    text = f"import tvm\nfrom tvm.script import tirx as T\n\n{ONE}\n\ndef specialize(mod, arch):\n    {statement}\n"
    space = Space(tmp_path).write({**FILES, "own/functions.py": text})
    done = json.loads(space.run("build", "function", "--json", code=1).stdout)
    (failed,) = done["failed"]
    assert failed["reason"].startswith(f"own/functions.py: what specialize() returns cannot be used: {sentence}")
