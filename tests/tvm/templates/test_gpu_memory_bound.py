"""Memory-bound kernels on GPUs, without one: what every proposed candidate computes, launches and holds, and that traces replay.

A schedule says what is computed also where nothing is bound to threads: with plain loops in their place, LLVM builds it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tvm
import tvm_ffi
from support.repository import REPOSITORY
from support.serial_programs import UNOPTIMISED
from support.thinned import every, only
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.cpu import apply_candidate, target_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Candidate, Proposal
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.rule import Rule

ROOT = REPOSITORY
ARCH = load_arch(ROOT, "h200")
ELEMENTWISE, REDUCE, ROWWISE, GEMV, FALLBACK = "gpu_elementwise", "gpu_reduce", "gpu_rowwise", "gpu_gemv", "gpu_fallback"
WINDOW = "gpu_window"

MARGIN_BYTES = 1 << 16

Case = tuple[str, str, dict[str, Any]]
"""A template, a rule, its attributes."""


def sliding_window(function: str) -> Case:
    return WINDOW, "tensor_ir", {"file": "tests/support/sliding_windows.py", "function": function}


SMALL: list[Case] = [
    *((ELEMENTWISE, "elementwise", {"op": "silu", "shape": shape, "dtype": "float16"}) for shape in [(1,), (7,), (5, 37), (3, 64, 50)]),
    *((ELEMENTWISE, "elementwise", {"op": "add", "shape": (9, 48), "dtype": dtype}) for dtype in ("float32", "int8", "float64")),
    (ELEMENTWISE, "elementwise", {"op": "gelu", "shape": (65, 128), "dtype": "float16"}),
    *((ELEMENTWISE, "take", {"shape": (6, 50), "indices": (48,), "axis": 1, "dtype": dtype}) for dtype in ("int8", "float16")),
    *((ELEMENTWISE, "cast", {"shape": (5, 48), "dtype": "int8", "out_dtype": dtype}) for dtype in ("float16", "float64")),
    *((ELEMENTWISE, "transpose", {"shape": shape, "axes": (1, 0)}) for shape in [(1, 17), (49, 81), (64, 128), (96, 40)]),
    (ELEMENTWISE, "transpose", {"shape": (2, 64, 3, 64), "axes": (0, 2, 3, 1), "dtype": "bfloat16"}),
    *((ELEMENTWISE, "tensor_ir", {"file": "tests/support/rearrangements.py", "function": name}) for name in ("joined", "cut", "turned")),
    *(
        (REDUCE, "reduce", {"op": "sum", "shape": shape, "axes": axes})
        for shape, axes in [((1, 1), (1,)), ((1031,), (0,)), ((3, 4096), (1,)), ((1031, 24), (1,))]
    ),
    *((REDUCE, "reduce", {"op": "max", "shape": (61, 71), "axes": (axis,), "dtype": "int8"}) for axis in (0, 1)),
    *((REDUCE, "reduce", {"op": "mean", "shape": (64, 1000), "axes": (axis,), "dtype": "float16"}) for axis in (0, 1)),
    (REDUCE, "reduce", {"op": "mean", "shape": (6, 7, 10, 50), "axes": (1, 3), "dtype": "bfloat16"}),
    *(
        (REDUCE, "reduce", {"op": op, "shape": shape, "axes": (0,)})
        for op, shape in [("sum", (4096, 8)), ("sum", (1031, 3)), ("max", (61, 2777))]
    ),
    *map(sliding_window, ["max_pool", "max_pool_of_integers", "mean_pool", "mean_of_few_channels", "depthwise"]),
    *((ROWWISE, "softmax", {"shape": shape, "dtype": "float16"}) for shape in [(128, 10), (9, 67), (3, 4, 256), (1, 100), (1031, 5)]),
    *((ROWWISE, "layer_norm", {"shape": shape}) for shape in [(6, 64), (7, 1001), (2, 3, 45), (2, 61, 12)]),
    (ROWWISE, "rms_norm", {"shape": (2, 3, 512), "dtype": "bfloat16"}),
    *((GEMV, "gemv", {"n": n, "k": k, "layout": layout}) for layout in "nt" for n, k in [(1, 300), (33, 45), (130, 1), (64, 512)]),
    (GEMV, "matmul", {"m": 1, "n": 64, "k": 512, "layout": "nt", "epilogue": ("bias", "relu"), "dtype": "float16"}),
    (GEMV, "matmul", {"batch": 3, "m": 1, "n": 40, "k": 64, "layout": "nt"}),
    *((GEMV, "gemv", {"n": 16, "k": 128, "layout": layout, "dtype": "int8"}) for layout in "nt"),
    *((GEMV, "gemv_i4", {"n": n, "k": k, "group": group}) for n, k, group in [(1, 32, 16), (33, 96, 6), (16, 512, 128)]),
    *((FALLBACK, "softmax", {"shape": shape, "axis": axis}) for shape, axis in [((4, 5, 33), 1), ((33,), 0), ((5, 1), 1)]),
    (FALLBACK, "matmul", {"m": 7, "n": 33, "k": 5}),
]
ODD_CHANNELS: dict[str, Any] = {"n": 2, "h": 9, "w": 9, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16", "epilogue": ("bias",)}
SMALL += [(WINDOW, "conv2d", ODD_CHANNELS | {"c": count, "f": count, "groups": count}) for count in (5, 67)]
LARGE: list[Case] = [
    (ELEMENTWISE, "elementwise", {"op": "copy", "shape": (128, 8192), "dtype": "float16"}),
    (ELEMENTWISE, "elementwise", {"op": "add", "shape": (16384, 16384), "dtype": "float16"}),
    (ELEMENTWISE, "transpose", {"shape": (8192, 4096), "axes": (1, 0), "dtype": "float16"}),
    (REDUCE, "reduce", {"op": "sum", "shape": (16384, 1024), "axes": (1,), "dtype": "float16"}),
    (REDUCE, "reduce", {"op": "sum", "shape": (4096, 16384), "axes": (0,), "dtype": "float16"}),
    (REDUCE, "reduce", {"op": "max", "shape": (4, 1 << 20), "axes": (1,), "dtype": "float16"}),
    sliding_window("large_max_pool"),
    (ROWWISE, "softmax", {"shape": (16384, 1024), "dtype": "float16"}),
    (ROWWISE, "layer_norm", {"shape": (4096, 4096), "dtype": "float16"}),
    (GEMV, "gemv", {"n": 16384, "k": 16384, "dtype": "float16"}),
    (GEMV, "gemv", {"n": 8192, "k": 8192, "dtype": "float16", "layout": "t"}),
    (GEMV, "gemv_i4", {"n": 16384, "k": 16384, "dtype": "float16"}),
]
"""Of sizes at which bandwidth matters."""


def name_of(value: Any) -> str:
    return "-".join(map(str, value.values())).replace(" ", "") if isinstance(value, dict) else str(value)


def lowered(rule: str, attrs: dict[str, Any]) -> tuple[Rule, tvm.IRModule]:
    made = load_rule(ROOT, rule).of(ROOT, attrs)
    return made, canonical.lower(made)


def proposals(name: str, mod: tvm.IRModule, arch: Arch = ARCH, top_k: int = 20) -> tuple[Proposal, ...]:
    return importlib.import_module(f"kerneldecl.policies.{name}").propose(iter_space(mod), arch, top_k)  # type: ignore[no-any-return]


def schedules(name: str, mod: tvm.IRModule) -> Iterator[Any]:
    """Apply every candidate that a policy proposes; each must apply: what a policy proposes for a template, fits."""
    proposed = proposals(name, mod)
    assert proposed
    for proposal in proposed:
        template = importlib.import_module(f"kerneldecl.templates.{proposal.candidate.template}")
        sch = template.apply(mod, dict(proposal.candidate.params), ARCH)
        assert sch is not None, proposal
        yield sch


def serial(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a scheduled module with plain loops in place of threads, and plain memory in place of theirs."""
    text = re.sub(r'T\.thread_binding\((T\.int64\(\d+\)|\d+), thread="[^"]+"\)', r"T.serial(\1)", mod.script())
    assert "thread_binding" not in text
    return tvm.script.from_source(re.sub(r', scope="(local|shared)"', "", text.replace("T.unroll(", "T.serial(")))


def guarded(array: Any) -> tuple[Any, Any]:
    """Return memory that ends in ones, and at its start a tensor that holds the array."""
    whole = np.ones(array.nbytes + MARGIN_BYTES, np.uint8)
    whole[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    memory = tvm.runtime.tensor(whole)
    return memory, memory._create_view(array.shape, str(array.dtype))


def extents(mod: tvm.IRModule) -> list[dict[str, int]]:
    """Return the launch parameters of each kernel."""
    calls = cuda._generated(mod["main"].with_attr("global_symbol", "kernel"), "kernel", ARCH).calls
    return [extents for _, extents in calls]


def cuda_source(sch: Any) -> str:
    library = cuda._generated(sch.mod["main"].with_attr("global_symbol", "kernel"), "kernel", ARCH).library
    return str(library.imports[0].inspect_source("cuda"))


@pytest.mark.parametrize(("template", "rule", "attrs"), every(13, SMALL), ids=name_of)
def test_proposed_schedules_compute_the_reference(template: str, rule: str, attrs: dict[str, Any]) -> None:
    made, mod = lowered(rule, attrs)
    inputs = made.inputs(np.random.default_rng(0))
    want = np.asarray(made.reference(*inputs)).reshape(made.signature().outputs[0].shape)  # of one output, or a list of one
    # What an intrinsic stands for is computed in its place.
    with mock.patch.object(tvm.s_tir.Schedule, "tensorize"):
        distinct = {tvm_ffi.structural_hash(sch.mod): sch for sch in schedules(template, mod)}
    # Neighbours in rank hardly differ, and parsing takes nearly all of the time.
    for sch in list(distinct.values())[::7]:
        whole, out = guarded(poisoned(made.signature().outputs[0]))
        tvm.tirx.build(serial(sch.mod), target=UNOPTIMISED)["main"](*map(tvm.runtime.tensor, inputs), out)
        assert relative_error(out.numpy(), want) <= made.tolerance(), sch.trace
        assert (whole.numpy()[-MARGIN_BYTES:] == 1).all(), f"writes beyond its output: {sch.trace}"


@pytest.mark.parametrize(("template", "rule", "attrs"), every(11, [*LARGE, *SMALL[::3]]), ids=name_of)
def test_proposed_kernels_can_be_launched(template: str, rule: str, attrs: dict[str, Any]) -> None:
    _, mod = lowered(rule, attrs)
    for sch in list(schedules(template, mod))[::5]:
        for launch in extents(sch.mod):
            threads = np.prod([launch.get(f"threadIdx.{axis}", 1) for axis in "xyz"])
            assert threads <= ARCH.the_gpu.max_threads_per_block
            assert launch["blockIdx.x"] < 2**31


@pytest.mark.parametrize(("template", "rule", "attrs"), every(2, LARGE), ids=name_of)
def test_first_candidates_read_global_memory_in_vectors(template: str, rule: str, attrs: dict[str, Any]) -> None:
    _, mod = lowered(rule, attrs)
    first = next(schedules(template, mod))
    source = cuda_source(first)
    largest = max(mod["main"].params, key=lambda param: np.prod([int(extent) for extent in param.ty.shape]))
    assert re.search(rf"= \*\((?:u?int|float|half)[24]\*\)\({largest.name}_ptr", source)


@pytest.mark.parametrize("out_dtype", only(("float16",), ["float16", "float32", "float64"]))
def test_vectors_of_bytes_become_vectors_that_cuda_has(out_dtype: str) -> None:
    _, mod = lowered("cast", {"shape": (64, 1024), "dtype": "int8", "out_dtype": out_dtype})
    assert all(
        re.search(r"\*\(u?(int|long|float|double)[24]\*\)\(T_cast_ptr|Y_ptr", cuda_source(sch)) for sch in schedules(ELEMENTWISE, mod)
    )


@pytest.mark.parametrize("dtype", only(("float8_e4m3fn",), ["int8", "float16", "float8_e4m3fn"]))
def test_vectors_of_what_indices_name_have_as_many_elements_as_vectors_of_indices(dtype: str) -> None:
    """CUDA has no vector of eight 64-bit integers."""
    _, mod = lowered("take", {"shape": (64, 4096), "indices": (128,), "axis": 1, "dtype": dtype})
    assert all("longlong4 " in cuda_source(sch) for sch in schedules(ELEMENTWISE, mod))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_weights_of_4_bits_become_floats_without_conversions(dtype: str) -> None:
    _, mod = lowered("gemv_i4", {"n": 256, "k": 4096, "dtype": dtype})
    source = cuda_source(next(schedules(GEMV, mod)))
    assert re.search(rf"kd_dot_i4_(pair_)?\d+(_{dtype})?\(", source)
    assert "((float)(((int)" not in source


def test_groups_that_vectors_do_not_divide_are_unpacked_one_by_one() -> None:
    _, mod = lowered("gemv_i4", {"n": 33, "k": 96, "group": 6})
    assert all("kd_dot_i4" not in cuda_source(sch) for sch in list(schedules(GEMV, mod))[::4])


@pytest.mark.parametrize("name", only(("t4", "h100-sxm"), ["t4", "a100-80gb", "l4", "rtx-4090", "h100-sxm", "b200"]))
@pytest.mark.parametrize(("template", "rule", "attrs"), [*LARGE, *SMALL[::4]], ids=name_of)
def test_candidates_are_proposed_for_every_gpu(name: str, template: str, rule: str, attrs: dict[str, Any]) -> None:
    _, mod = lowered(rule, attrs)
    found = proposals(template, mod, load_arch(ROOT, name))
    assert found
    assert len({proposal.candidate for proposal in found}) == len(found)


def test_traces_replay_from_a_database(tmp_path: Path) -> None:
    for at, (template, rule, attrs) in enumerate(LARGE):
        _, mod = lowered(rule, attrs)
        sch = next(schedules(template, mod))
        folder = tmp_path / str(at)
        folder.mkdir()
        database = JSONDatabase(work_dir=str(folder))
        args = ArgInfo.from_entry_func(mod, remove_preproc=False)
        database.commit_tuning_record(TuningRecord(sch.trace, database.commit_workload(mod), [1.0], target_of(ARCH), args))
        (record,) = JSONDatabase(work_dir=str(folder)).get_all_tuning_records()
        again = tvm.s_tir.Schedule(record.workload.mod)
        record.trace.apply_to_schedule(again, remove_postproc=False)
        assert tvm_ffi.structural_equal(again.mod, sch.mod)


@pytest.mark.parametrize(
    ("template", "other", "rule", "attrs"), every(4, [ELEMENTWISE, REDUCE, WINDOW, ROWWISE, GEMV], SMALL[::2]), ids=name_of
)
def test_unsuitable_functions_give_none_and_never_an_error(template: str, other: str, rule: str, attrs: dict[str, Any]) -> None:
    """Parameters made for one function are tried on all others."""
    _, suited = lowered(*next((rule, attrs) for name, rule, attrs in LARGE if name == template))
    _, mod = lowered(rule, attrs)
    apply = importlib.import_module(f"kerneldecl.templates.{template}").apply
    for proposal in proposals(template, suited, top_k=2):
        sch = apply(mod, dict(proposal.candidate.params), ARCH)
        assert sch is None or template == other or extents(sch.mod)


NORMS = {"layer_norm": (4096,), "rms_norm": (4096,), "softmax": (1024,)}


@pytest.mark.parametrize("is_stock", [False, True], ids=["ours", "TVM's own passes"])
@pytest.mark.parametrize("rule", NORMS)
def test_results_that_threads_share_are_written_once_and_read_once(rule: str, is_stock: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An artifact's database is replayed by TVM as it stands, whose StorageRewrite puts values where threads exchange results."""
    if is_stock:
        monkeypatch.setattr(cuda, "_pass_config", lambda _: cuda.PASS_CONFIG)
    _, mod = lowered(rule, {"shape": (64, *NORMS[rule]), "dtype": "float16"})
    params = {"in_registers": True, "rows": 1, "threads": 128, "width": 8}
    schedule = apply_candidate(ROOT, mod, Candidate.of("gpu_rowwise", params), ARCH)
    assert schedule is not None
    shared = [line.strip() for line in cuda_source(schedule).splitlines() if "(volatile float*)red_result" in line]
    written = [line for line in shared if line.startswith("((volatile")]
    assert len(written) == len({line.partition("=")[0] for line in written}) == (1 if rule == "rms_norm" else 2)
    assert all("red_buf" in line.partition("=")[2] for line in written)
    if not is_stock:
        assert len(shared) == 2 * len(written)
