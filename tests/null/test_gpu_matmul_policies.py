"""Policies for products on GPUs: what is recognised, what they propose and why tensor cores are refused, without TVM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kerneldecl
from kerneldecl.archfile import read_arch
from kerneldecl.contraction import Contraction, contraction_of, tensor_cores_refuse
from kerneldecl.model import Access, Arch, Axis, Block, IterSpace
from kerneldecl.policies import _gpu_windows, gpu_matmul_simt, gpu_matmul_tc
from kerneldecl.policies._gpu_model import occupancy

ARCHS = Path(kerneldecl.__file__).parent / "archs"


def arch(name: str) -> Arch:
    path = ARCHS / f"{name}.toml"
    return read_arch(name, path.read_bytes(), path.name)


H200 = arch("h200")
GPUS = [path.stem for path in sorted(ARCHS.glob("*.toml")) if arch(path.stem).gpu is not None]
SIZES = [(1024, 1024, 1024), (8192, 8192, 8192), (16, 4096, 4096), (1000, 1003, 517), (2, 2, 16), (1, 1, 1), (5, 7, 3), (17, 4096, 64)]


def access(operand: str, axes: tuple[Axis, ...], dtype: str, *dims: dict[int, int]) -> Access:
    """Build an access from one {axis: coefficient} for each dimension; an axis of extent 1 is left out, as it is a constant."""
    shape = tuple(1 + sum(step * (axes[axis].extent - 1) for axis, step in dim.items()) for dim in dims)
    index = tuple(tuple((axis, step) for axis, step in dim.items() if axes[axis].extent > 1) for dim in dims)
    return Access(operand, shape, dtype, index)


def matmul(size: tuple[int, int, int], layout: str = "nn", dtype: str = "float16", sums: str = "float32", batch: int = 0) -> IterSpace:
    m, n, k = size
    leading = (Axis("b", batch, "spatial"),) if batch else ()
    axes = (*leading, Axis("i", m, "spatial"), Axis("j", n, "spatial"), Axis("k", k, "reduce"))
    i, j, r = (at + len(leading) for at in range(3))
    outer: list[dict[int, int]] = [{0: 1}] if batch else []
    left = [{i: 1}, {r: 1}] if layout[0] == "n" else [{r: 1}, {i: 1}]
    right = [{r: 1}, {j: 1}] if layout[1] == "n" else [{j: 1}, {r: 1}]
    reads = access("A", axes, dtype, *outer, *left), access("B", axes, dtype, *outer, *right)
    return IterSpace((Block("product", axes, reads, (access("C", axes, sums, *outer, {i: 1}, {j: 1}),), 2),), ("A", "B"), ("C",))


def conv2d(c: int = 64, f: int = 64) -> IterSpace:
    extents = {"n": 8, "h": 56, "w": 56, "f": f, "r": 3, "s": 3, "c": c}
    axes = tuple(Axis(name, extent, "reduce" if name in "rsc" else "spatial") for name, extent in extents.items())
    pixels = access("padded", axes, "float16", {0: 1}, {1: 1, 4: 1}, {2: 1, 5: 1}, {6: 1})
    weights = access("W", axes, "float16", {4: 1}, {5: 1}, {6: 1}, {3: 1})
    out = access("C", axes, "float32", {0: 1}, {1: 1}, {2: 1}, {3: 1})
    return IterSpace((Block("conv", axes, (pixels, weights), (out,), 2),), ("padded", "W"), ("C",))


def product(space: IterSpace) -> Contraction:
    found = contraction_of(space)
    assert isinstance(found, Contraction), found
    return found


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("batch", [0, 3])
def test_product_is_read_with_its_layout_and_batch(layout: str, batch: int) -> None:
    found = product(matmul((48, 80, 24), layout, batch=batch))
    assert found.layout == layout
    assert found.extents == (batch or 1, 48, 80, 24)
    assert (found.left.position, found.right.position) == (0, 1)


def test_operands_are_told_apart_by_what_they_index_not_by_their_order() -> None:
    space = matmul((48, 80, 24))
    (block,) = space.blocks
    swapped = product(replace(space, blocks=(replace(block, reads=block.reads[::-1]),)))
    assert (swapped.left.position, swapped.right.position) == (1, 0)
    assert swapped.extents == (1, 48, 80, 24)


def test_convolution_is_a_product_of_pixels_and_filters() -> None:
    found = product(conv2d())
    assert found.extents == (1, 8 * 56 * 56, 64, 3 * 3 * 64)
    assert found.layout == "nn"
    # Channels of one pixel lie side by side, pixels of one channel do not.
    assert found.left.vector() == 8
    assert gpu_matmul_tc.propose(conv2d(), H200, 5, ())


@pytest.mark.parametrize(("k", "vector"), [(64, 8), (36, 4), (10, 2), (517, 1)])
def test_vectors_divide_rows_so_that_each_is_aligned(k: int, vector: int) -> None:
    assert product(matmul((64, 64, k), "nt")).left.vector() == vector


@pytest.mark.parametrize(
    ("space", "gpu", "reason"),
    [
        (matmul((64, 64, 64), dtype="float32"), "h200", "no intrinsic for float32 summed in float32"),
        (matmul((64, 64, 64)), "v100", "older than mma.sync"),
        (matmul((64, 64, 64)), "t4", "older than mma.sync"),
        (matmul((64, 64, 64), "nn", "int8", "int32"), "h200", "layout is nn"),
        (matmul((2, 4, 64)), "h200", "2 rows and 4 columns"),
        (matmul((1, 4096, 4096)), "h200", "product with a vector"),
        (matmul((64, 64, 8)), "h200", "sums have 8 terms"),
    ],
)
def test_tensor_cores_are_refused_with_a_reason(space: IterSpace, gpu: str, reason: str) -> None:
    assert reason in tensor_cores_refuse(product(space), arch(gpu).the_gpu)
    assert reason in gpu_matmul_tc.why_not(space, arch(gpu))
    assert gpu_matmul_tc.propose(space, arch(gpu), 20, ()) == ()


@pytest.mark.parametrize(
    "space", [matmul((64, 64, 64)), matmul((64, 64, 64), "tt", "bfloat16"), matmul((64, 64, 64), "nt", "int8", "int32")]
)
def test_tensor_cores_are_taken_where_they_apply(space: IterSpace) -> None:
    assert gpu_matmul_tc.why_not(space, H200) == ""
    assert gpu_matmul_tc.propose(space, H200, 20, ())


def test_sum_without_a_second_operand_is_no_product() -> None:
    space = matmul((64, 64, 64))
    (block,) = space.blocks
    alone = replace(space, blocks=(replace(block, reads=block.reads[:1]),))
    assert contraction_of(alone) == "its reduction reads 1 operand; a product has two"
    assert gpu_matmul_simt.propose(alone, H200, 20, ()) == ()


POLICIES = {"gpu_matmul_tc": gpu_matmul_tc, "gpu_matmul_simt": gpu_matmul_simt}
EXTENTS = st.one_of(st.integers(1, 40), st.integers(41, 5000), st.sampled_from([64, 128, 1024, 4096, 8192]))
DTYPES = st.sampled_from(
    [("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32"), ("float32", "float32"), ("int8", "int32")]
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("size", SIZES)
def test_every_proposal_fits_the_gpu(policy: str, name: str, size: tuple[int, int, int]) -> None:
    dtypes = ("float16", "float32") if policy == "gpu_matmul_tc" else ("int8", "int32")
    _fits(policy, name, size, matmul(size, "nt", *dtypes))


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    name=st.sampled_from(GPUS),
    size=st.tuples(EXTENTS, EXTENTS, EXTENTS),
    layout=st.sampled_from(["nn", "nt", "tn", "tt"]),
    dtypes=DTYPES,
    batch=st.sampled_from([0, 0, 3]),
)
@settings(max_examples=60, deadline=None)
def test_every_proposal_fits_the_gpu_whatever_the_size(
    policy: str, name: str, size: tuple[int, int, int], layout: str, dtypes: tuple[str, str], batch: int
) -> None:
    _fits(policy, name, size, matmul(size, layout, *dtypes, batch))


def _fits(policy: str, name: str, size: tuple[int, int, int], space: IterSpace) -> None:
    gpu, read = arch(name).the_gpu, contraction_of(space)
    proposals = POLICIES[policy].propose(space, arch(name), 1000, ())
    assert not (proposals and isinstance(read, str)), "what is no product has no tiles"
    assert len({proposal.candidate for proposal in proposals}) == len(proposals)
    for proposal in proposals:
        assert isinstance(read, Contraction)
        params: dict[str, Any] = dict(proposal.candidate.params)
        if policy == "gpu_matmul_tc":
            tc = gpu_matmul_tc.Tiling(**params)
            threads, registers, smem = tc.warps * 32, gpu_matmul_tc.registers(read, tc), gpu_matmul_tc.smem_bytes(read, tc)
        else:
            simt = gpu_matmul_simt.Tiling(**params)
            threads, registers, smem = simt.threads, gpu_matmul_simt.registers(simt, gpu), gpu_matmul_simt.smem_bytes(read, simt)
        assert occupancy(gpu, threads, registers, smem) >= 1
        rows = -(-read.extents[1] // params["block_m"])
        assert rows % params["raster"] == 0
        assert params["stages"] <= 1 + -(-size[2] // params["block_k"])


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(("c", "f"), [(3, 64), (3, 17), (8, 96), (64, 64)])
def test_parts_of_images_fit_the_gpu(name: str, c: int, f: int) -> None:
    gpu, space = arch(name).the_gpu, conv2d(c, f)
    windows = _gpu_windows.windows_of(space, product(space))
    assert windows is not None
    proposals = gpu_matmul_tc.propose(space, arch(name), 1000, ())
    of_images = [proposal for proposal in proposals if proposal.candidate.template == "gpu_conv2d_tc"]
    for proposal in of_images:
        params: dict[str, Any] = dict(proposal.candidate.params)
        tiling = _gpu_windows.Tiling(**params)
        assert tiling.warps * 32 <= gpu.max_threads_per_block
        assert _gpu_windows.smem_bytes(windows, product(space), tiling) <= gpu.smem_per_block_optin_bytes
    # Long sums are left to the template for products, which does not spell them out.
    assert bool(of_images) == (bool(proposals) and 9 * c <= 16 * 16)


def test_a_product_without_overlapping_windows_is_no_image() -> None:
    space = matmul((64, 64, 64))
    assert _gpu_windows.windows_of(space, product(space)) is None


@pytest.mark.parametrize("policy", [gpu_matmul_tc, gpu_matmul_simt])
def test_the_reduction_is_cut_where_blocks_would_leave_most_of_the_gpu_idle(policy: Any) -> None:
    def parts(size: tuple[int, int, int]) -> set[object]:
        return {dict(proposal.candidate.params)["parts"] for proposal in policy.propose(matmul(size), H200, 5, ())}

    assert parts((128, 128, 65536)).isdisjoint({1})
    assert parts((8192, 8192, 8192)) == {1}


@pytest.mark.parametrize("policy", [gpu_matmul_tc, gpu_matmul_simt])
@pytest.mark.parametrize("size", SIZES)
def test_proposals_are_distinct_ordered_and_a_shorter_list_is_the_start_of_a_longer(policy: Any, size: tuple[int, int, int]) -> None:
    space = matmul(size, "nn")
    proposals = policy.propose(space, H200, 200, ())
    assert policy.propose(space, H200, 20, ()) == proposals[:20]
    assert len({proposal.candidate for proposal in proposals}) == len(proposals)
    assert [p.predicted_secs for p in proposals] == sorted(p.predicted_secs for p in proposals)


@pytest.mark.parametrize("size", SIZES)
def test_any_product_has_a_schedule_on_cuda_cores(size: tuple[int, int, int]) -> None:
    for name in GPUS:
        assert gpu_matmul_simt.propose(matmul(size, "tt"), arch(name), 1, ())
