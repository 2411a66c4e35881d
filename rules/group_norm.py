"""Owns group normalisation, of which instance normalisation is the case of as many groups as channels.

Knows nothing of how many passes over its input a schedule makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Gt

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature

from .shared.pointwise import OPERATIONS


@dataclass(frozen=True, kw_only=True)
class GroupNorm(Rule):
    """Y = (X - mean) / sqrt(variance + eps) * gamma + beta, with the statistics of each image's groups of neighbouring channels."""

    shape: tuple[Extent, ...]
    """Shape of X and Y: images, then channels and any axes of pixels; gamma and beta have one element for each channel."""
    groups: Extent
    """Groups of channels, each normalised by itself over all pixels; as many as channels for an instance norm."""
    axis: int = 1
    """The axis of channels: 1, or the last, -1, as in NHWC."""
    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the variance."""
    activation: Literal["", "relu", "silu", "gelu"] = ""
    """What is applied to the result, if anything."""
    dtype: FloatDtype = "float32"
    """Dtype of all arguments; 16-bit ones are computed in float32."""

    @property
    def _is_channels_last(self) -> bool:
        return self.axis in {-1, len(self.shape) - 1}

    @property
    def _channels(self) -> int:
        return self.shape[-1] if self._is_channels_last else self.shape[1]

    def problems(self) -> Iterator[str]:
        if len(self.shape) < 2:
            yield "shape needs at least two extents, images and channels; write shape = [8, 64], or more"
        elif self.axis not in {1, -1, len(self.shape) - 1}:
            yield f"axis {self.axis} is neither 1 nor the last of {len(self.shape)}; write axis = 1 or axis = -1"
        elif self._channels % self.groups:
            yield f"groups {self.groups} does not divide the {self._channels} channels; write a divisor"

    def signature(self) -> Signature:
        channels = (self._channels,)
        inputs = Arg("X", self.shape, self.dtype), Arg("gamma", channels, self.dtype), Arg("beta", channels, self.dtype)
        return Signature(inputs, (Arg("Y", self.shape, self.dtype),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.group_norm import GroupNormSpec, group_norm

        return group_norm(
            GroupNormSpec(
                shape=self.shape,
                groups=self.groups,
                is_channels_last=self._is_channels_last,
                eps=self.eps,
                dtype=self.dtype,
                activation=self.activation,
            )
        )

    def reference(self, *inputs: Array) -> Array:
        x, gamma, beta = (array.astype(np.float64) for array in inputs)
        first = np.moveaxis(x, self.axis, 1)
        grouped = first.reshape(len(x), self.groups, -1)
        variance = grouped.var(axis=-1, keepdims=True)
        normalised = (grouped - grouped.mean(axis=-1, keepdims=True)) / np.sqrt(variance + self.eps)
        per_channel = (self._channels, *(1 for _ in self.shape[2:]))
        scaled = normalised.reshape(first.shape) * gamma.reshape(per_channel) + beta.reshape(per_channel)
        result = OPERATIONS[self.activation].reference(scaled) if self.activation else scaled
        return np.ascontiguousarray(np.moveaxis(result, 1, self.axis))

    def flops(self) -> int:
        """Return eight operations for each element, as of layer_norm, and those of the activation."""
        return (8 + (OPERATIONS[self.activation].flops if self.activation else 0)) * math.prod(self.shape)
