"""Owns sequences as images of one row, so that what convolves images convolves sequences, too.

Knows nothing of convolutions.
"""

from __future__ import annotations

from kerneldecl.model import Access

IMAGE_RANK = 4
"""Dimensions of images: image, row, column, channel."""


def with_row(access: Access) -> Access:
    """Return an access to sequences [n, w, c] as one to images of one row; others as they are."""
    if len(access.shape) != IMAGE_RANK - 1:
        return access
    (images, *others), (image, *index) = access.shape, access.index
    return Access(access.operand, (images, 1, *others), access.dtype, (image, (), *index))
