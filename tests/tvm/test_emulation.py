# ruff: noqa: ANN202, C901, F821, N812, PLR0912, PLR0915, SIM102  a kernel in TVMScript is not Python
"""The emulator runs a right kernel for Hopper to the right result, and names what is wrong with wrong ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compilers import needs_nvcc
from emulation import EmulationError, UnknownInstructionError, emulate, ptx
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TMABar
from tvm.script import tirx as T

pytestmark = needs_nvcc

M, N, K = 128, 128, 320
BLOCK, STAGES = 64, 2
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
PREFETCH = "cp.async.bulk.prefetch.tensor.2d.L2.global"
MULTIPLY = "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"


def gemm(flaw: str = "") -> Any:
    """Return c = a b^T by one producer warp and one consumer warpgroup over all tiles of 64 x 64, with a flaw if one is named."""
    tile_bytes = BLOCK * BLOCK * 2
    expected = 2 * tile_bytes + (16 if flaw == "expects too much" else 0)
    arrivals = 2 if flaw == "arrives too often" else 4
    first = 0 if flaw == "wrong phase" else 1

    # fmt: off
    @T.prim_func
    def main(a_ptr: T.handle, b_ptr: T.handle, c_ptr: T.handle):
        a = T.match_buffer(a_ptr, (M, K), "float16", align=16)
        b = T.match_buffer(b_ptr, (N, K), "float16", align=16)
        c = T.match_buffer(c_ptr, (M, N), "float16", align=16)
        a_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", a_map, "float16", 2, a.data, K, M, K * 2, BLOCK, BLOCK, 1, 1, 0, 3, 2, 0)
        b_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", b_map, "float16", 2, b.data, K, N, K * 2, BLOCK, BLOCK, 1, 1, 0, 3, 2, 0)
        c_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", c_map, "float16", 2, c.data, N, M, N * 2, BLOCK, BLOCK, 1, 1, 0, 3, 0, 0)
        T.device_entry()
        if flaw == "a cluster's barrier without the warp":
            T.cta_id_in_cluster([2])
            T.cta_id([2])
        else:
            T.cta_id([1])
        wg_id = T.warpgroup_id([2])
        warp_id = T.warp_id_in_wg([4])
        lane_id = T.lane_id([32])
        pool = T.SMEMPool()
        a_shared = pool.alloc((STAGES, BLOCK * BLOCK), "float16", align=1024)
        b_shared = pool.alloc((STAGES, BLOCK * BLOCK), "float16", align=1024)
        c_shared = pool.alloc((BLOCK * BLOCK,), "float16", align=1024)
        full = TMABar(pool, STAGES)
        empty = MBarrier(pool, STAGES)
        pool.commit()
        full.init(1)
        empty.init(arrivals)
        T.ptx.fence.mbarrier_init.release.cluster()
        if flaw != "no barrier after initialisation":
            T.cuda.cta_sync()
        if wg_id == 0:
            if warp_id == 0:
                if T.cuda.elect_sync():
                    state = PipelineState(STAGES, first)
                    T.ptx[PREFETCH](T.address_of(b_map), 8 if flaw == "prefetches what it does not load" else 0, 0)
                    for tile in T.serial((M // BLOCK) * (N // BLOCK)):
                        for k in T.serial(K // BLOCK):
                            if flaw != "no wait for an empty stage":
                                empty.wait(state.stage, state.phase)
                            full.arrive(state.stage, expected)
                            T.ptx[LOAD](a_shared.ptr_to([state.stage, 0]), T.address_of(a_map),
                                        k * BLOCK, tile // 2 * BLOCK, full.ptr_to([state.stage]))
                            T.ptx[LOAD](b_shared.ptr_to([state.stage, 0]), T.address_of(b_map),
                                        k * BLOCK, tile % 2 * BLOCK, full.ptr_to([state.stage]))
                            state.advance()
        else:
            acc = T.alloc_local((32,), "float32")
            packed = T.alloc_local((4,), "uint32")
            a_desc: T.uint64
            b_desc: T.uint64
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(a_desc), a_shared.ptr_to([0, 0]), 1, 64, 3)
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(b_desc), b_shared.ptr_to([0, 0]), 1, 64, 3)
            state = PipelineState(STAGES, 0)
            for tile in T.serial((M // BLOCK) * (N // BLOCK)):
                for k in T.serial(K // BLOCK):
                    if flaw != "no wait for a full stage":
                        full.wait(state.stage, state.phase)
                    if flaw != "no wgmma.fence":
                        T.ptx.wgmma.fence.sync.aligned()
                    for kk in T.unroll(4):
                        offset = T.meta_var(T.cast(state.stage * (tile_bytes // 16) + kk * 2, "uint64"))
                        T.ptx[MULTIPLY](*[acc[i] for i in range(32)], a_desc + offset, b_desc + offset, T.Or(k > 0, kk > 0), 1, 1, 0, 0)
                    T.ptx.wgmma.commit_group.sync.aligned()
                    if flaw != "no wait for wgmma":
                        T.ptx.wgmma.wait_group.sync.aligned(0)
                    if lane_id == 0:
                        empty.arrive(state.stage)
                    state.advance()
                if flaw == "no wait for wgmma":
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                if flaw != "epilogue's buffer is still being stored":
                    if (warp_id == 0) & (lane_id == 0):
                        T.ptx.cp.async_.bulk.wait_group.read(0)
                    T.cuda.warpgroup_sync(1)
                for j in T.unroll(4):
                    for q in T.unroll(4):
                        T.ptx.cvt.rn.f16x2.f32(packed[q], acc[j * 8 + q * 2 + 1], acc[j * 8 + q * 2])
                    row = T.meta_var(warp_id * 16 + lane_id % 16)
                    chunk = T.meta_var(T.bitwise_xor(j * 2 + lane_id // 16, lane_id % 8))
                    T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"](
                        c_shared.ptr_to([row * 64 + chunk * 8]), packed[0], packed[1], packed[2], packed[3])
                if flaw != "no fence before the store":
                    T.ptx.fence.proxy.async_.shared__cta()
                if flaw != "no barrier before the store":
                    T.cuda.warpgroup_sync(1)
                if (warp_id == 0) & (lane_id == 0):
                    T.ptx[STORE](T.address_of(c_map), tile % 2 * BLOCK, tile // 2 * BLOCK, c_shared.ptr_to([0]))
                    T.ptx.cp.async_.bulk.commit_group()
            if flaw == "writes beyond an argument":
                c[M - 1, N + warp_id * 32 + lane_id] = T.float16(0)
            if flaw != "ends before the store has read":
                if (warp_id == 0) & (lane_id == 0):
                    T.ptx.cp.async_.bulk.wait_group(0)
        if flaw == "a cluster's barrier without the warp":
            T.cuda.cluster_sync()
    # fmt: on
    return main


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float16) for shape in ((M, K), (N, K)))
    return a, b, np.full((M, N), np.nan, np.float16)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_right_kernel_gives_the_right_result(seed: int) -> None:
    a, b, c = operands()
    a_after, b_after, got = emulate(gemm(), a, b, c, seed=seed)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2e-3, atol=2e-3)
    assert (a_after == a).all()
    assert (b_after == b).all()


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("wrong phase", "deadlock: .* wait for parity"),
        ("expects too much", "deadlock: .* 16 bytes missing"),
        ("arrives too often", "deadlock|still fills|still being read"),
        ("no barrier after initialisation", "where none was initialised"),
        ("no wait for an empty stage", "asynchronous copy still fills|still being read|more often than its 1 times"),
        ("no wait for a full stage", "asynchronous copy still fills|nobody has written"),
        ("no wait for wgmma", "still being read"),
        ("no wgmma.fence", "without wgmma.fence"),
        ("epilogue's buffer is still being stored", "still being read"),
        ("no fence before the store", "without fence.proxy.async"),
        ("no barrier before the store", "without fence.proxy.async|nobody has written"),
        ("ends before the store has read", "have not been waited for"),
        ("a cluster's barrier without the warp", "aligned barrier of the cluster without its warp"),
        ("prefetches what it does not load", "has prefetched 1 boxes that it did not load"),
        ("writes beyond an argument", r"writes byte \d+ of argument 2, which has 32768"),
    ],
)
def test_wrong_kernels_are_caught(flaw: str, words: str) -> None:
    with pytest.raises(EmulationError, match=words):
        emulate(gemm(flaw), *operands())


def test_an_instruction_without_a_model_is_named() -> None:
    source = 'void helper(int x) {\n  asm volatile("{ .reg .pred p; frobnicate.sync.b32 p, %0; }" : : "r"(x));\n}\n'
    with pytest.raises(UnknownInstructionError, match=r"helper: the emulator has no model of frobnicate\.sync\.b32"):
        ptx.translate(source)
