"""Owns workspaces whose kernels are traceless functions: a GEMM of one tile by wgmma, and an addition in TIRx.

Knows nothing of what a test expects.
"""

from __future__ import annotations

TILE = """\
import tvm
from tvm.backend.cuda.lang.pipeline import TMABar
from tvm.script import tirx as T

M, N, K = 64, 16, 64
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
MMA = "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16"


def tile(promotion=2):
    @T.prim_func
    def gemm(A: T.Buffer((M, K), "float16"), B: T.Buffer((N, K), "float16"), C: T.Buffer((M, N), "float32")):
        A_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", A_map, "float16", 2, A.data, K, M, 2 * K, K, M, 1, 1, 0, 3, promotion, 0)
        B_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", B_map, "float16", 2, B.data, K, N, 2 * K, K, N, 1, 1, 0, 3, promotion, 0)
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        T.cta_id([1])
        T.warpgroup_id([1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        pool = T.SMEMPool()
        As = pool.alloc((M * K,), "float16", align=1024)
        Bs = pool.alloc((N * K,), "float16", align=1024)
        full = TMABar(pool, 1)
        pool.commit()
        full.init(1)
        T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cta_sync()
        if warp == 0:
            if T.cuda.elect_sync():
                full.arrive(0, 2 * (M + N) * K)
                T.ptx[LOAD](As.ptr_to([0]), T.address_of(A_map), 0, 0, full.ptr_to([0]))
                T.ptx[LOAD](Bs.ptr_to([0]), T.address_of(B_map), 0, 0, full.ptr_to([0]))
        acc = T.alloc_local((N // 2,), "float32")
        desc_a: T.uint64
        desc_b: T.uint64
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(desc_a), As.ptr_to([0]), 1, 64, 3)
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(desc_b), Bs.ptr_to([0]), 1, 64, 3)
        full.wait(0, 0)
        T.ptx.wgmma.fence.sync.aligned()
        for kk in T.unroll(K // 16):
            T.ptx[MMA](
                *[acc[i] for i in range(N // 2)],
                desc_a + T.cast(kk * 2, "uint64"), desc_b + T.cast(kk * 2, "uint64"), kk > 0, 1, 1, 0, 0)
        T.ptx.wgmma.commit_group.sync.aligned()
        T.ptx.wgmma.wait_group.sync.aligned(0)
        for nb in T.unroll(N // 8):
            for h in T.unroll(2):
                for v in T.vectorized(2):
                    C[warp * 16 + h * 8 + lane // 4, nb * 8 + (lane % 4) * 2 + v] = acc[nb * 4 + h * 2 + v]

    return gemm
"""
"""A GEMM of one tile: TMA, an mbarrier, wgmma."""
ADDITION = """\
import tvm
from tvm.script import tirx as T


def addition(size, threads=128, cluster=1):
    @T.prim_func
    def add(A: T.Buffer((size,), "float16"), B: T.Buffer((size,), "float16"), C: T.Buffer((size,), "float16")):
        T.device_entry()
        T.cta_id_in_cluster([cluster])
        block = T.cta_id([size // threads])
        thread = T.thread_id([threads])
        C[block * threads + thread] = A[block * threads + thread] + B[block * threads + thread]

    return add
"""
"""An addition of vectors, one element per thread."""
POLICY = """\
from kerneldecl.model import Candidate, Proposal

TEMPLATES = ("tile",)


def propose(space, arch, top_k):
    return (Proposal(Candidate.of("tile", {}), 1e-6),)
"""
GEMM = {"m": 64, "n": 16, "k": 64, "layout": "nt", "dtype": "float16", "out_dtype": "float32"}
"""Attributes of rule matmul that the tile computes."""
WORKLOADS = """\
edition = 1

[artifact]
name = "mini"
version = "0.1.0"

[target.gpu]
arch = "h200"

[[workload]]
name = "gemm"
rule = "matmul"
m = 64
n = 16
k = 64
layout = "nt"
dtype = "float16"
out_dtype = "float32"
policy = "plain"

[[workload]]
name = "addition"
rule = "elementwise"
op = "add"
shape = [4096]
dtype = "float16"
top_k = 2
specialize = "own/addition.py"
"""
FILES = {
    "workloads.toml": WORKLOADS,
    "policies/plain.py": POLICY,
    "templates/tile.py": f"{TILE}\n\ndef apply(mod, params, arch):\n    return tvm.IRModule({{'gemm': tile()}})\n",
    "own/addition.py": f"{ADDITION}\n\ndef specialize(mod, arch):\n    yield addition(4096)\n    yield addition(4096, cluster=2)\n",
}
"""A workspace for a GPU whose GEMM is a template's TIRx, and whose addition has custom kernels."""
