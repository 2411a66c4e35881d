"""Owns what policies of convolutions on wgmma share: how they read a convolution of images, and what all tilings of one have in common.

Knows nothing of tiles, stages or times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from kerneldecl.analysis.contraction import Contraction, contraction_of, stored
from kerneldecl.analysis.hopper_limits import TMA_ALIGN_BYTES
from kerneldecl.analysis.images import IMAGE_RANK, with_row
from kerneldecl.model import Access, Arch, Block, Gpu, IterSpace, Proposal
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first
from kerneldecl.policies.hopper.operands import has_residual
from kerneldecl.policies.hopper.ranking import in_turns

ITEM_BYTES = 2
"""Bytes of an operand's element."""
ALIGNED_ITEMS = TMA_ALIGN_BYTES // ITEM_BYTES
"""Elements of which a tensor map's strides are multiples."""
SAME_TILE = 4
"""Proposals of one tile at most; see `gemm_tiles.ranked`."""

_ConvT = TypeVar("_ConvT")


class ConvProblem(NamedTuple, Generic[_ConvT]):
    """What all tilings of a convolution have in common."""

    conv: _ConvT
    """The sizes of the convolution, as its policy reads them."""
    gemm: Contraction
    out_dtype: str
    gpu: Gpu
    has_residual: bool = False
    """Whether the epilogue reads a residual of which TMA may load tiles."""

    @property
    def filters(self) -> int:
        return self.gemm.extents[2]


class ImageReduction(NamedTuple):
    """A reduction over images that nothing but copies precedes."""

    block: Block
    image: Access
    source: Access
    """The argument that holds the image, without the margins around it."""


def _image_reduction(space: IterSpace, gemm: Contraction) -> ImageReduction | None:
    """Return the reduction over images with dimensions image, row, column, channel; None for other computations."""
    before = list(itertools.takewhile(lambda block: not block.is_reduction, space.blocks))
    block = space.blocks[len(before)]
    image = block.reads[gemm.a.position]
    source, image = with_row(stored(space, image)), with_row(image)
    is_image = len(image.index) == IMAGE_RANK and len(with_row(block.writes[0]).shape) == IMAGE_RANK
    if gemm.batch or not is_image or not all(map(_is_copy, before)) or not _adds_only_margins(source, image):
        return None
    return ImageReduction(block, image, source)


def _is_copy(block: Block) -> bool:
    """Say whether a block moves elements and computes nothing, such as one that adds a margin."""
    return len(block.reads) == 1 and block.reads[0].dtype == block.writes[0].dtype and block.flops_per_point == 0


def _adds_only_margins(source: Access, image: Access) -> bool:
    """Say whether an image has the argument's number of images and channels, so that at most margins were added."""
    return len(source.shape) == len(image.shape) and (source.shape[0], source.shape[3]) == (image.shape[0], image.shape[3])


@dataclass(frozen=True)
class ConvPolicy(Generic[_ConvT]):
    """A policy of convolutions on wgmma: what it proposes, given how it reads a convolution and times its tilings."""

    convolution_of: Callable[[ImageReduction, Contraction], _ConvT | None]
    """Returns the sizes that the policy needs of a convolution over images, None for other computations."""
    why_not_tiled: Callable[[ConvProblem[_ConvT], IterSpace, Arch], str]
    """Returns why the template does not take a convolution, as a sentence; empty where it does."""
    estimates: Callable[[ConvProblem[_ConvT]], Iterator[Estimate]]
    """Yields the tilings to try with their predicted times."""

    def propose(self, space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
        """Return the tilings with the least predicted time, best first; nothing for what the template does not take."""
        return tuple(itertools.islice(self.proposals(space, arch), top_k))

    def proposals(self, space: IterSpace, arch: Arch) -> Iterator[Proposal]:
        """Yield what `propose` returns."""
        problem = self._problem_of(space, arch)
        return iter(()) if isinstance(problem, str) else in_turns(best_first(self.estimates(problem), SAME_TILE))

    def why_not(self, space: IterSpace, arch: Arch) -> str:
        """Return why the template does not take a computation, as a sentence; empty where it does."""
        problem = self._problem_of(space, arch)
        return problem if isinstance(problem, str) else ""

    def _problem_of(self, space: IterSpace, arch: Arch) -> ConvProblem[_ConvT] | str:
        gemm = contraction_of(space)
        if isinstance(gemm, str):
            return gemm
        reduction = _image_reduction(space, gemm)
        conv = None if reduction is None else self.convolution_of(reduction, gemm)
        if conv is None:
            return "it is not a convolution of images in NHWC layout"
        problem = ConvProblem(conv, gemm, space.blocks[-1].writes[0].dtype, arch.the_gpu, has_residual(space))
        return self.why_not_tiled(problem, space, arch) or problem
