"""Owns the order of the passes that turn an imported module into operators that rules compute.

Knows nothing of what each pass does, nor of fusion and lowering, which follow.
"""

from __future__ import annotations

import tvm
from tvm import relax

from kerneldecl.compiler.graph.batch_norm import FoldBatchNorm
from kerneldecl.compiler.graph.constants import FoldConstants
from kerneldecl.compiler.graph.convolutions import ChannelsLast, MergePadding, SplitPadding
from kerneldecl.compiler.graph.elementwise import OrderOperands, SeparateGates, SimplifyClips, VectorBiases
from kerneldecl.compiler.graph.shapes import SimplifyShapes

GRAPH_PASSES: tuple[tvm.transform.Pass, ...] = (
    relax.transform.CanonicalizeBindings(),  # an element of a tuple is what it was made of
    FoldConstants(),
    FoldBatchNorm(),  # knows convolutions as they were imported
    MergePadding(),
    SimplifyClips(),
    ChannelsLast(),
    relax.transform.EliminateCommonSubexpr(),  # an image that is read twice is transposed once
    FoldConstants(),  # repacks the weights, once
    SplitPadding(),
    SimplifyShapes(),
    VectorBiases(),
    OrderOperands(),
    SeparateGates(),
    relax.transform.DeadCodeElimination(),
)
"""The passes before fusion, the same for extraction and deployment: what was extracted is what a deployed model calls."""
