"""GEMMs and convolutions on the CPU: schedules compute what NumPy computes, and their traces replay elsewhere."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.cpus import SSE, runnable
from support.thinned import at, every
from tvm import te
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

from kerneldecl.arrays import Array, numpy_dtype, relative_error
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.policies import cpu_conv2d as conv2d_policy
from kerneldecl.policies import cpu_gemv as gemv_policy
from kerneldecl.policies import cpu_matmul as matmul_policy
from kerneldecl.templates import cpu_conv2d, cpu_dot, cpu_gemv, cpu_matmul

ARCH = runnable(SSE)
TEMPLATES = {"cpu_matmul": cpu_matmul, "cpu_dot": cpu_dot, "cpu_conv2d": cpu_conv2d, "cpu_gemv": cpu_gemv}
TOLERANCE = {"float16": 5e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12, "int32": 0.0}

MATMUL = {
    "tile_m": 4, "tile_n": 8, "block_m": 4, "block_n": 8, "block_k": 0, "pack_m": False, "pack_n": True, "order": "nm",
}  # fmt: skip
DOT = {"tile_m": 2, "tile_n": 3, "block_m": 4, "block_n": 12, "order": "nm"}
CONV2D = {"tile_w": 5, "tile_f": 8, "block_h": 1, "block_f": 8, "pack_f": True, "order": "fw", "pad_at": "task"}


def prim_func(*tensors: Any) -> tvm.IRModule:
    func = te.create_prim_func(list(tensors), index_dtype_override="int64")
    return tvm.IRModule({"main": func.with_attr({"global_symbol": "main", "tirx.noalias": True})})


def run(sch: Any, *inputs: Array) -> Array:
    library = tvm.tirx.build(sch.mod, target=tvm.target.Target(dict(ARCH.tvm_target)))
    out = sch.mod["main"].params[-1].ty
    result = tvm.runtime.tensor(np.full([int(extent) for extent in out.shape], 77).astype(numpy_dtype(str(out.dtype))))
    library["main"](*(tvm.runtime.tensor(array) for array in inputs), result)
    return result.numpy()


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    whole = rng.integers(-8, 8, shape)
    return whole.astype(numpy_dtype(dtype)) if dtype.startswith("int") else rng.standard_normal(shape).astype(numpy_dtype(dtype))


def constant(value: float, dtype: str) -> Any:
    return tvm.tirx.const(value, dtype)


def epilogue(steps: tuple[str, ...], accumulated: Any, dtype: str) -> tuple[Any, list[Any]]:
    """Append steps as separate TE stages; `scaled_gate` reads the stage before it twice, on two paths."""
    operands, x = [], accumulated
    for step in steps:
        shape, before = x.shape, x
        if step == "bias":
            operand = te.placeholder(shape[-1:], dtype, "bias")
            operands.append(operand)
            x = te.compute(shape, lambda *i: before[i] + operand[i[-1]], "biased")  # noqa: B023  evaluated at once
        elif step == "add":
            operand = te.placeholder(shape, dtype, "residual")
            operands.append(operand)
            x = te.compute(shape, lambda *i: before[i] + operand[i], "added")  # noqa: B023
        elif step == "relu":
            x = te.compute(shape, lambda *i: te.max(before[i], constant(0, dtype)), "relu")  # noqa: B023
        elif step == "gate":
            half = te.compute(shape, lambda *i: before[i] * constant(0.5, dtype), "half")  # noqa: B023
            x = te.compute(shape, lambda *i: before[i] * half[i], "gated")  # noqa: B023
        else:
            x = te.compute(shape, lambda *i: before[i].astype(step), "cast")  # noqa: B023
    return x, operands


def epilogue_reference(steps: tuple[str, ...], x: Array, operands: list[Array]) -> Array:
    left = list(operands)
    for step in steps:
        if step in {"bias", "add"}:
            x = x + left.pop(0)
        elif step == "relu":
            x = np.maximum(x, 0)
        elif step == "gate":
            x = x * x * 0.5
    return x


def matmul(m: int, n: int, k: int, layout: str = "nn", **options: Any) -> tvm.IRModule:
    dtype, steps, batch = options.get("dtype", "float32"), options.get("epilogue", ()), options.get("batch", ())
    accum = options.get("accum", dtype)
    a = te.placeholder((*batch, *((m, k) if layout[0] == "n" else (k, m))), dtype, "A")
    b = te.placeholder((*batch, *((k, n) if layout[1] == "n" else (n, k))), dtype, "B")
    r = te.reduce_axis((0, k), "k")

    def element(*index: Any) -> Any:
        *z, i, j = index
        left = a(*z, i, r) if layout[0] == "n" else a(*z, r, i)
        right = b(*z, r, j) if layout[1] == "n" else b(*z, j, r)
        return te.sum(left.astype(accum) * right.astype(accum), axis=r)

    out, operands = epilogue(steps, te.compute((*batch, m, n), element, "gemm"), accum)
    return prim_func(a, b, *operands, out)


def check_matmul(params: dict[str, Any], m: int, n: int, k: int, layout: str = "nn", **options: Any) -> None:
    mod = matmul(m, n, k, layout, **options)
    check_gemm(mod, cpu_matmul.apply(mod, {**MATMUL, **params}, ARCH), layout, options.get("epilogue", ()))


def check_gemm(mod: tvm.IRModule, sch: Any, layout: str, steps: tuple[str, ...]) -> None:
    assert sch is not None
    rng = np.random.default_rng(0)
    types = [param.ty for param in mod["main"].params]
    a, b, *operands = (random(rng, tuple(int(extent) for extent in ty.shape), str(ty.dtype)) for ty in types[:-1])
    left = a.astype("float64") if layout[0] == "n" else a.astype("float64").swapaxes(-1, -2)
    right = b.astype("float64") if layout[1] == "n" else b.astype("float64").swapaxes(-1, -2)
    want = epilogue_reference(steps, left @ right, operands)
    assert relative_error(run(sch, a, b, *operands), want) <= TOLERANCE[str(types[-1].dtype)]


@pytest.mark.parametrize(
    ("layout", "shape", "params"),
    every(
        4,
        ["nn", "nt", "tn", "tt"],
        [
            ((32, 64, 48), {"block_m": 16, "block_n": 32}),
            ((32, 64, 48), {"block_m": 32, "block_n": 32, "block_k": 16, "pack_m": True, "order": "mn"}),
            ((37, 129, 65), {"block_m": 40, "block_n": 8}),
            ((37, 129, 65), {"block_m": 8, "block_n": 136, "block_k": 32, "order": "mn"}),
            ((1, 24, 33), {"tile_m": 1, "block_m": 1}),
            ((5, 1, 7), {"tile_m": 5, "tile_n": 1, "block_m": 5, "block_n": 1}),
            ((1, 1, 1), {"tile_m": 1, "tile_n": 1, "block_m": 1, "block_n": 1}),
        ],
    ),
)
def test_every_layout_matches_numpy(layout: str, shape: tuple[int, int, int], params: dict[str, Any]) -> None:
    check_matmul(params, *shape, layout, epilogue=("bias", "relu"))


@pytest.mark.parametrize("shape", at({1}, [(each,) for each in [(16, 24, 20), (13, 19, 20), (1, 24, 20)]]))
@pytest.mark.parametrize("steps", [(), ("gate",), ("bias", "gate", "add", "relu"), ("add", "float16")])
def test_epilogues_join_the_tile(shape: tuple[int, int, int], steps: tuple[str, ...]) -> None:
    tile_m = min(4, shape[0])
    check_matmul({"tile_m": tile_m, "block_m": tile_m}, *shape, "nt", epilogue=steps)


@pytest.mark.parametrize(
    ("dtype", "accum"),
    at({1, 4}, [("float64", "float64"), ("float16", "float32"), ("bfloat16", "float32"), ("float16", "float16"), ("int8", "int32")]),
)
def test_dtypes_and_batches(dtype: str, accum: str) -> None:
    check_matmul({"block_m": 8}, 13, 24, 20, "nt", dtype=dtype, accum=accum, batch=(3,))
    check_matmul({"block_m": 8, "pack_m": True, "pack_n": False}, 16, 24, 20, dtype=dtype, accum=accum, batch=(1,))


@pytest.mark.parametrize(
    ("layout", "shape", "params"),
    every(
        3,
        ["nn", "nt", "tt"],
        [
            ((8, 24, 32), {}),
            ((8, 24, 32), {"block_m": 8, "block_n": 24, "order": "mn"}),
            ((7, 24, 32), {}),
            ((1, 7, 16), {"tile_m": 1, "tile_n": 1, "block_m": 1, "block_n": 7}),
            ((1, 1, 4), {"tile_m": 1, "tile_n": 1, "block_m": 1, "block_n": 1}),
        ],
    ),
)
def test_dot_gemms_match_numpy(layout: str, shape: tuple[int, int, int], params: dict[str, Any]) -> None:
    for batch, dtype, steps in (((), "float32", ()), ((3,), "float32", ("bias", "gate")), ((), "float16", ("relu", "float16"))):
        mod = matmul(*shape, layout, batch=batch, dtype=dtype, accum="float32", epilogue=steps)
        check_gemm(mod, cpu_dot.apply(mod, {**DOT, **params}, ARCH), layout, steps)


def test_dot_gemms_need_whole_vectors() -> None:
    assert cpu_dot.apply(matmul(8, 24, 30, "nt"), DOT, ARCH) is None


def conv2d(h: int, c: int, f: int, **options: Any) -> tvm.IRModule:
    from tvm import topi

    size, stride, padding, dilation, groups = (options.get(name, 1) for name in ("size", "stride", "padding", "dilation", "groups"))
    dtype, accum = options.get("dtype", "float32"), options.get("accum", "float32")
    panel = options.get("panel", 0)
    taps = (size, size, c // groups)
    x, w = te.placeholder((2, h, h, c), dtype, "X"), te.placeholder((f // panel, *taps, panel) if panel else (*taps, f), dtype, "W")
    margin = [0, padding, padding, 0]
    padded = topi.nn.pad(x, margin, margin, name="padded")
    side = (h + 2 * padding - dilation * (size - 1) - 1) // stride + 1
    r, s, q = te.reduce_axis((0, size), "r"), te.reduce_axis((0, size), "s"), te.reduce_axis((0, c // groups), "q")

    def element(n: Any, i: Any, j: Any, o: Any) -> Any:
        channel = q if groups == 1 else o // (f // groups) * (c // groups) + q
        pixel = padded(n, i * stride + r * dilation, j * stride + s * dilation, channel)
        weight = w(o // panel, r, s, q, o % panel) if panel else w(r, s, q, o)
        return te.sum(pixel.astype(accum) * weight.astype(accum), axis=[r, s, q])

    out, operands = epilogue(options.get("epilogue", ()), te.compute((2, side, side, f), element, "convolved"), accum)
    return prim_func(x, w, *operands, out)


def conv2d_reference(x: Array, w: Array, **options: Any) -> Array:
    stride, padding, dilation, groups = (options.get(name, 1) for name in ("stride", "padding", "dilation", "groups"))
    if options.get("panel"):
        w = w.transpose(1, 2, 3, 0, 4).reshape(*w.shape[1:4], -1)
    size, f = w.shape[0], w.shape[3]
    x, w = np.pad(x.astype("float64"), ((0, 0), (padding, padding), (padding, padding), (0, 0))), w.astype("float64")
    side = (x.shape[1] - dilation * (size - 1) - 1) // stride + 1
    receptive_field = stride * (side - 1) + 1
    out = np.zeros((x.shape[0], side, side, f))
    width, outputs = x.shape[3] // groups, f // groups
    for r, s, g in itertools.product(range(size), range(size), range(groups)):
        top, left = r * dilation, s * dilation
        pixels = x[:, top : top + receptive_field : stride, left : left + receptive_field : stride, g * width : (g + 1) * width]
        out[..., g * outputs : (g + 1) * outputs] += pixels @ w[r, s, :, g * outputs : (g + 1) * outputs]
    return out


@pytest.mark.parametrize(
    ("params", "options"),
    at(
        {0, 2, 4, 7, 8, 13},
        [
            ({"block_h": 5, "block_f": 16}, {"epilogue": ("bias", "relu")}),
            ({"block_h": 2, "order": "wf", "block_f": 16, "pad_at": "root"}, {"epilogue": ("bias", "gate", "add")}),
            ({"pack_f": False}, {"stride": 2}),
            ({"tile_w": 2}, {"padding": 0, "dilation": 2, "size": 3}),
            ({"tile_f": 4, "block_f": 8}, {"groups": 4}),
            ({"tile_f": 16, "block_f": 16, "pack_f": False}, {"groups": 16}),
            ({}, {"size": 1, "padding": 0}),
            ({}, {"dtype": "float16", "epilogue": ("relu", "float16")}),
            ({"pad_at": "root"}, {"dtype": "int8", "accum": "int32"}),
            *(
                ({"tile_f": tile_f, "block_f": 16, "pack_f": False}, {"panel": panel})
                for tile_f, panel in ((8, 8), (4, 8), (16, 4), (8, 16))
            ),
            (
                {"tile_w": 2, "tile_f": 8, "pack_f": False, "order": "wf"},
                {"panel": 8, "padding": 0, "stride": 2, "epilogue": ("bias", "add")},
            ),
            ({"tile_f": 4, "block_f": 8, "pack_f": False, "pad_at": "root"}, {"panel": 4, "groups": 2, "dilation": 2, "padding": 2}),
            ({"pack_f": False, "block_h": 10}, {"panel": 4, "size": 1, "padding": 0, "dtype": "float16", "epilogue": ("relu", "float16")}),
            ({"tile_f": 16, "block_f": 16, "pack_f": False}, {"panel": 16}),
        ],
    ),
)
def test_convolutions_match_numpy(params: dict[str, Any], options: dict[str, Any]) -> None:
    options = {"size": 3, **options}
    mod = conv2d(10, 16, 16, **options)
    types = [param.ty for param in mod["main"].params]
    sch = cpu_conv2d.apply(mod, {**CONV2D, **params}, ARCH)
    assert sch is not None
    rng = np.random.default_rng(0)
    x, w, *operands = (random(rng, tuple(int(extent) for extent in ty.shape), str(ty.dtype)) for ty in types[:-1])
    want = epilogue_reference(options.get("epilogue", ()), conv2d_reference(x, w, **options), operands)
    assert relative_error(run(sch, x, w, *operands), want) <= TOLERANCE[str(types[-1].dtype)]


def test_weights_in_panels_are_not_packed_again_and_fit_register_tiles() -> None:
    mod = conv2d(10, 16, 24, size=3, panel=8)
    assert cpu_conv2d.apply(mod, {**CONV2D, "pack_f": False, "block_f": 24}, ARCH) is not None
    assert cpu_conv2d.apply(mod, CONV2D, ARCH) is None
    assert cpu_conv2d.apply(mod, {**CONV2D, "pack_f": False, "tile_f": 12, "block_f": 24}, ARCH) is None
    assert cpu_conv2d.apply(mod, {**CONV2D, "pack_f": False, "tile_f": 3, "block_f": 24}, ARCH) is None


def test_what_is_no_contraction_is_left_alone() -> None:
    x = te.placeholder((8, 8), "float32", "X")
    r = te.reduce_axis((0, 8), "r")
    row_sums = prim_func(x, te.compute((8,), lambda i: te.sum(x[i, r], axis=r), "sums"))
    copy = prim_func(x, te.compute((8, 8), lambda i, j: x[i, j], "copy"))
    gemm = matmul(8, 8, 8)
    assert cpu_matmul.apply(row_sums, MATMUL, ARCH) is None
    assert cpu_matmul.apply(copy, MATMUL, ARCH) is None
    assert cpu_conv2d.apply(gemm, CONV2D, ARCH) is None
    assert cpu_matmul.apply(conv2d(10, 16, 16, size=3), MATMUL, ARCH) is None
    assert matmul_policy.propose(iter_space(row_sums), ARCH, 20) == ()
    assert conv2d_policy.propose(iter_space(gemm), ARCH, 20) == ()
    assert matmul_policy.propose(iter_space(conv2d(10, 16, 16, size=3)), ARCH, 20) == ()


@pytest.mark.parametrize("extent", [8, 10])
def test_what_reads_accumulators_elsewhere_is_no_epilogue_and_follows_in_its_own_loop(extent: int) -> None:
    shape = (extent, extent)
    a, b = te.placeholder(shape, "float32", "A"), te.placeholder(shape, "float32", "B")
    r = te.reduce_axis((0, extent), "r")
    gemm = te.compute(shape, lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), "gemm")
    mod = prim_func(a, b, te.compute(shape, lambda i, j: gemm[j, i] + gemm[i, j], "both"))
    sch = cpu_matmul.apply(mod, {**MATMUL, "pack_m": True, "pack_n": True}, ARCH)
    assert sch is not None
    x, y = (np.random.default_rng(0).standard_normal(shape).astype("float32") for _ in range(2))
    assert relative_error(run(sch, x, y), x @ y + (x @ y).T) <= TOLERANCE["float32"]


REPLAY = """
import json, sys
sys.modules["torch"] = None  # which tvm_ffi imports where it is installed: it takes seconds
import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase
for folder in sys.argv[1:]:
    database = JSONDatabase(work_dir=folder)
    record = database.get_all_tuning_records()[0]
    sch = tvm.s_tir.Schedule(record.workload.mod)
    record.trace.apply_to_schedule(sch, remove_postproc=False)
    print(json.dumps(sch.mod.script()))
"""


def test_traces_replay_in_another_process(tmp_path: Path) -> None:
    gemm = matmul(13, 24, 20, "nt", epilogue=("bias", "gate"))
    convolution = conv2d(10, 16, 16, size=3, epilogue=("bias", "relu"))
    schedules = [
        cpu_matmul.apply(gemm, {**MATMUL, "block_m": 8, "block_k": 8}, ARCH),
        cpu_dot.apply(gemm, {**DOT, "tile_m": 1, "block_m": 13}, ARCH),
        cpu_conv2d.apply(convolution, CONV2D, ARCH),
    ]
    folders = []
    for i, (mod, sch) in enumerate(zip((gemm, gemm, convolution), schedules, strict=True)):
        folders.append(tmp_path / str(i))
        folders[-1].mkdir()
        database = JSONDatabase(work_dir=str(folders[-1]))
        target = tvm.target.Target(dict(ARCH.tvm_target))
        info = ArgInfo.from_entry_func(mod)
        database.commit_tuning_record(TuningRecord(sch.trace, database.commit_workload(mod), [1e-3], target, info))
    replay = subprocess.run([sys.executable, "-c", REPLAY, *folders], check=True, capture_output=True, text=True)
    assert [json.loads(line) for line in replay.stdout.splitlines()] == [sch.mod.script() for sch in schedules]


@pytest.mark.parametrize(
    ("policy", "mod"),
    at(
        {0, 5, 10, 13},
        [
            (matmul_policy, matmul(37, 129, 65, "nt")),
            (matmul_policy, matmul(1, 64, 64, "nt")),
            (gemv_policy, matmul(1, 33, 500, "nn", epilogue=("bias", "relu"))),
            (gemv_policy, matmul(1, 64, 7, "tn")),
            (matmul_policy, matmul(4, 64, 64, "nt")),
            (matmul_policy, matmul(64, 3, 64, "tn", batch=(2,))),
            (matmul_policy, matmul(1, 1, 1)),
            (conv2d_policy, conv2d(10, 16, 16, size=3)),
            (conv2d_policy, conv2d(9, 3, 10, size=3, stride=2)),
            (conv2d_policy, conv2d(10, 16, 16, size=3, groups=16)),
            (conv2d_policy, conv2d(10, 16, 24, size=3, groups=4, padding=0)),
            (conv2d_policy, conv2d(3, 16, 16, size=3, padding=0)),
            (conv2d_policy, conv2d(10, 16, 1, size=1, padding=0)),
            (conv2d_policy, conv2d(10, 16, 48, size=3, panel=16)),
            (conv2d_policy, conv2d(7, 16, 16, size=1, padding=0, panel=16)),
        ],
    ),
)
def test_every_proposal_applies(policy: Any, mod: tvm.IRModule) -> None:
    proposals = policy.propose(iter_space(mod), ARCH, 20)
    assert proposals
    schedules = [TEMPLATES[proposal.candidate.template].apply(mod, dict(proposal.candidate.params), ARCH) for proposal in proposals]
    assert all(sch is not None for sch in schedules)


def hottest_loop(assembly: str) -> list[str]:
    """Return the instructions of the innermost loop with the most fused multiply-adds."""
    lines = [line.strip() for line in assembly.splitlines()]
    labels = {line.partition(":")[0]: i for i, line in enumerate(lines) if line.startswith(".LBB")}
    jumps = [(i, line.split()[-1]) for i, line in enumerate(lines) if line.startswith("j") and line.split()[-1] in labels]
    loops = [lines[labels[label] + 1 : i] for i, label in jumps if labels[label] < i]
    innermost = [loop for loop in loops if not any(line.startswith(".LBB") for line in loop)]
    return max(innermost, key=lambda loop: sum("fmadd" in line for line in loop))


@pytest.mark.parametrize(
    ("policy", "mod"),
    at(
        {1},
        [
            (matmul_policy, matmul(512, 512, 512, "nt")),
            (matmul_policy, matmul(500, 260, 300, "tn", epilogue=("bias", "relu"))),
            (matmul_policy, matmul(4, 512, 512, "nt")),
            (conv2d_policy, conv2d(28, 64, 64, size=3, epilogue=("bias", "relu"))),
        ],
    ),
)
def test_accumulators_stay_in_registers_while_the_reduction_runs(policy: Any, mod: tvm.IRModule) -> None:
    wide = replace(ARCH, cpu=replace(SSE, vector_bytes=64, vector_registers=32))
    target = tvm.target.Target({"kind": "llvm", "mcpu": "znver4", "mtriple": "x86_64-linux-gnu", "num-cores": 2})
    for proposal in policy.propose(iter_space(mod), wide, 2):
        sch = TEMPLATES[proposal.candidate.template].apply(mod, dict(proposal.candidate.params), wide)
        loop = hottest_loop(tvm.tirx.build(sch.mod, target=target).inspect_source("asm"))
        assert sum("fmadd" in line and "zmm" in line for line in loop) >= 8
        # AT&T syntax: the last operand is the destination, and memory is written (…).
        assert not [line for line in loop if line.startswith("vmov") and line.split("#")[0].rstrip().endswith(")")]
