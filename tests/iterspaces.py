"""Owns iteration spaces of GEMMs and convolutions as policies see them, and the GPUs that policies are asked about, without TVM.

Knows nothing of what policies propose for them.
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

import kerneldecl
from kerneldecl.analysis.contraction import Contraction, contraction_of
from kerneldecl.hardware.arch_file import read_arch
from kerneldecl.model import Access, Arch, Axis, Block, IterSpace

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


def matmul(
    size: tuple[int, int, int], layout: str = "nn", dtype: str = "float16", accum_dtype: str = "float32", batch: int = 0
) -> IterSpace:
    m, n, k = size
    leading = (Axis("b", batch, "spatial"),) if batch else ()
    axes = (*leading, Axis("i", m, "spatial"), Axis("j", n, "spatial"), Axis("k", k, "reduce"))
    i, j, r = (at + len(leading) for at in range(3))
    outer: list[dict[int, int]] = [{0: 1}] if batch else []
    a = [{i: 1}, {r: 1}] if layout[0] == "n" else [{r: 1}, {i: 1}]
    b = [{r: 1}, {j: 1}] if layout[1] == "n" else [{j: 1}, {r: 1}]
    reads = access("A", axes, dtype, *outer, *a), access("B", axes, dtype, *outer, *b)
    return IterSpace((Block("gemm", axes, reads, (access("C", axes, accum_dtype, *outer, {i: 1}, {j: 1}),), 2),), ("A", "B"), ("C",))


def conv2d(c: int = 64, f: int = 64, dtype: str = "float16") -> IterSpace:
    extents = {"n": 8, "h": 56, "w": 56, "f": f, "r": 3, "s": 3, "c": c}
    axes = tuple(Axis(name, extent, "reduce" if name in "rsc" else "spatial") for name, extent in extents.items())
    pixels = access("padded", axes, dtype, {0: 1}, {1: 1, 4: 1}, {2: 1, 5: 1}, {6: 1})
    weights = access("W", axes, dtype, {4: 1}, {5: 1}, {6: 1}, {3: 1})
    out = access("C", axes, "float32", {0: 1}, {1: 1}, {2: 1}, {3: 1})
    return IterSpace((Block("conv", axes, (pixels, weights), (out,), 2),), ("padded", "W"), ("C",))


def gemm(space: IterSpace) -> Contraction:
    found = contraction_of(space)
    assert isinstance(found, Contraction), found
    return found


EXTENTS = st.one_of(st.integers(1, 40), st.integers(41, 5000), st.sampled_from([64, 128, 1024, 4096, 8192]))
