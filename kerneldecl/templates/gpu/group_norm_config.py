"""Owns what the kernels of group norms are made for, and a thread's view of its thread block: which elements are its own.

Knows nothing of the kernels' statements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.group_norm import GpuGroupNormParams, GroupNormSizes
from kerneldecl.compiler.group_norm import GroupNormSpec

CELLS_OF_LANE = 8
"""Sums that one lane adds up at most before lanes combine theirs, as far as a warp has lanes for that."""


@dataclass(frozen=True)
class GroupNormKernel:
    """A group norm with the parameters of its kernels, and what follows from both."""

    spec: GroupNormSpec
    params: GpuGroupNormParams
    pdl: bool

    @property
    def sizes(self) -> GroupNormSizes:
        return self.spec.sizes

    @property
    def groups(self) -> int:
        """Return the groups of a thread block."""
        return self.params.block_groups(self.sizes)

    @property
    def slices(self) -> int:
        """Return how many sets of groups an image has."""
        return self.sizes.groups // self.groups

    @property
    def cells(self) -> int:
        return self.params.cells(self.sizes)

    @property
    def kept(self) -> int:
        """Return how many sums a thread keeps apart."""
        return self.params.width if self.spec.is_channels_last else 1

    @property
    def cells_of_group(self) -> int:
        return self.cells // self.groups

    @property
    def lanes_of_group(self) -> int:
        """Return how many lanes add up the cells of one group: a power of two."""
        wanted = -(-self.cells_of_group // CELLS_OF_LANE)
        return min(WARP_LANES, 1 << (wanted - 1).bit_length())

    @property
    def steps(self) -> int:
        return self.params.steps(self.sizes)

    @property
    def group_elements(self) -> int:
        return self.sizes.size * self.sizes.pixels


class Args(NamedTuple):
    """Flat buffers of the function's arguments."""

    x: Any
    gamma: Any
    beta: Any
    y: Any


class Block(NamedTuple):
    """A thread's view of its thread block."""

    kernel: GroupNormKernel
    args: Args
    image: Any
    first_group: Any
    chunk: Any
    thread: Any

    @property
    def column(self) -> Any:
        return self.thread % self.kernel.params.columns

    @property
    def row(self) -> Any:
        return self.thread // self.kernel.params.columns

    @property
    def first_channel(self) -> Any:
        """Return the thread's first channel where channels are last."""
        return self.first_group * self.kernel.sizes.size + self.column * self.kernel.params.width

    def first_element(self, group: Any) -> Any:
        """Return the offset of a group's first element."""
        sizes = self.kernel.sizes
        if self.kernel.spec.is_channels_last:
            return self.image * (sizes.pixels * sizes.channels) + group * sizes.size
        return (self.image * sizes.groups + group) * self.kernel.group_elements

    def vector(self, step: Any) -> Any:
        """Return which of the vectors of a row's set of groups a thread takes in a step: a pixel, or the stretch of a row of threads."""
        return (self.chunk * self.kernel.steps + step) * self.kernel.params.rows + self.row

    def within(self, step: Any) -> Any:
        """Return where in a group's stretch of memory a thread's vector begins where pixels are last."""
        return (self.vector(step) * self.kernel.params.columns + self.column) * self.kernel.params.width

    def has(self, step: Any) -> Any:
        """Say whether there is a vector for the thread in a step."""
        kernel = self.kernel
        if kernel.spec.is_channels_last:
            is_there = self.vector(step) < kernel.sizes.pixels
            idle = kernel.params.threads - kernel.params.columns * kernel.params.rows
            return T.And(is_there, self.row < kernel.params.rows) if idle else is_there
        return T.And(self.within(step) < kernel.group_elements, self.row < 1)

    def offset(self, step: Any) -> Any:
        """Return the offset of a thread's vector."""
        sizes = self.kernel.sizes
        if self.kernel.spec.is_channels_last:
            return (self.image * sizes.pixels + self.vector(step)) * sizes.channels + self.first_channel
        return self.first_element(self.first_group) + self.within(step)
