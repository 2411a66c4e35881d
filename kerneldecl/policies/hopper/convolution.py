"""Owns what policies of convolutions on wgmma share: how they read a convolution of images, and what all tilings of one have in common.

Knows nothing of tiles, stages or times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kerneldecl.analysis.contraction import Contraction, contraction_of, stored
from kerneldecl.analysis.hopper_limits import TMA_ALIGN_BYTES
from kerneldecl.model import Access, Arch, Block, Gpu, IterSpace

ITEM_BYTES = 2
"""Bytes of an operand's element."""
ALIGNED_ITEMS = TMA_ALIGN_BYTES // ITEM_BYTES
"""Elements of which a tensor map's strides are multiples."""
IMAGE_RANK = 4
"""Dimensions of images: image, row, column, channel."""

_ConvT = TypeVar("_ConvT")


class ConvProblem(NamedTuple, Generic[_ConvT]):
    """What all tilings of a convolution have in common."""

    conv: _ConvT
    """The sizes of the convolution, as its policy reads them."""
    gemm: Contraction
    out_dtype: str
    gpu: Gpu

    @property
    def filters(self) -> int:
        return self.gemm.extents[2]


class ImageReduction(NamedTuple):
    """A reduction over images that nothing but copies precedes."""

    block: Block
    image: Access
    source: Access
    """The argument that holds the image, without the margins around it."""


def image_reduction(space: IterSpace, gemm: Contraction) -> ImageReduction | None:
    """Return the reduction over images with dimensions image, row, column, channel; None for other computations."""
    before = list(itertools.takewhile(lambda block: not block.is_reduction, space.blocks))
    block = space.blocks[len(before)]
    image = block.reads[gemm.a.position]
    source = stored(space, image)
    if gemm.batch or len(image.index) != IMAGE_RANK or not all(map(_is_copy, before)) or not _adds_only_margins(source, image):
        return None
    return ImageReduction(block, image, source)


def _is_copy(block: Block) -> bool:
    """Say whether a block moves elements and computes nothing, such as one that adds a margin."""
    return len(block.reads) == 1 and block.reads[0].dtype == block.writes[0].dtype and block.flops_per_point == 0


def _adds_only_margins(source: Access, image: Access) -> bool:
    """Say whether an image has the argument's number of images and channels, so that at most margins were added."""
    return len(source.shape) == len(image.shape) and (source.shape[0], source.shape[3]) == (image.shape[0], image.shape[3])


def problem_of(
    space: IterSpace,
    arch: Arch,
    convolution_of: Callable[[IterSpace, Contraction], _ConvT | None],
    why_not_tiled: Callable[[ConvProblem[_ConvT]], str],
) -> ConvProblem[_ConvT] | str:
    """Return the convolution that a function is, or why a template does not take it, as a sentence.

    `convolution_of` reads the sizes that the policy needs, and `why_not_tiled` returns the template's own reason, or nothing.
    """
    gemm = contraction_of(space)
    if isinstance(gemm, str):
        return gemm
    conv = convolution_of(space, gemm)
    if conv is None:
        return "it is not a convolution of images in NHWC layout"
    problem = ConvProblem(conv, gemm, space.blocks[-1].writes[0].dtype, arch.the_gpu)
    return why_not_tiled(problem) or problem
