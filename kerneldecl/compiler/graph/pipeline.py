"""Owns the order of the passes that turn an imported module into operators that rules compute.

Knows nothing of what each pass does, nor of fusion and lowering.
"""

from __future__ import annotations

import tvm
from tvm import relax

from kerneldecl.compiler.graph.adaptive_pooling import ExpandAdaptivePooling
from kerneldecl.compiler.graph.batch_norm import FoldBatchNorm
from kerneldecl.compiler.graph.channels_last import ChannelsLast
from kerneldecl.compiler.graph.constants import FoldConstants
from kerneldecl.compiler.graph.convolutions import MergePadding, SplitPadding
from kerneldecl.compiler.graph.elementwise import OrderOperands, SeparateGates, SimplifyClips, VectorBiases
from kerneldecl.compiler.graph.empty_tensors import EmptyTensors
from kerneldecl.compiler.graph.expand_attention import ExpandAttention
from kerneldecl.compiler.graph.float32_accumulation import AccumulateInFloat32
from kerneldecl.compiler.graph.fold_indices import FoldIndices
from kerneldecl.compiler.graph.instance_norms import InstanceNorms
from kerneldecl.compiler.graph.join_linears import JoinLinears, SplitLinears
from kerneldecl.compiler.graph.name_functions import NameFunctions
from kerneldecl.compiler.graph.normalize_views import NormalizeViews
from kerneldecl.compiler.graph.order_shapes import OrderShapes
from kerneldecl.compiler.graph.recognize_patterns import RecognizePatterns
from kerneldecl.compiler.graph.rule_use import Fuses, fuses_nothing
from kerneldecl.compiler.graph.scans_and_sorts import ExpandScansAndSorts
from kerneldecl.compiler.graph.shapes import SimplifyShapes
from kerneldecl.compiler.graph.simplify_indices import SimplifyIndices
from kerneldecl.compiler.graph.use_rules import UseRules


def graph_passes(fuses: Fuses = fuses_nothing) -> tuple[tvm.transform.Pass, ...]:
    """Return the passes before fusion, the same for extraction and deployment: what was extracted is what a deployed model calls.

    `fuses` says whether the target has a kernel for a whole attention, and for a convolution with weights in panels.
    """
    return (
        relax.transform.CanonicalizeBindings(),  # an element of a tuple is what it was made of
        EmptyTensors(),
        ExpandAttention(),
        FoldIndices(),
        RecognizePatterns(),
        InstanceNorms(),
        NormalizeViews(),
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
        NormalizeViews(),
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.CanonicalizeBindings(),  # it leaves aliases
        SplitLinears(),
        JoinLinears(),
        UseRules(fuses),
        AccumulateInFloat32(),  # what no rule does
        ExpandScansAndSorts(),
        ExpandAdaptivePooling(),
        SeparateGates(),  # by views, which NormalizeViews would remove
        relax.transform.DeadCodeElimination(),
    )


GRAPH_PASSES = graph_passes()
"""The passes for a target without fused kernels."""

FUSED_PASSES: tuple[tvm.transform.Pass, ...] = (
    relax.transform.RewriteDataflowReshape(),  # a reshape becomes a view, which needs no kernel
    relax.transform.DeadCodeElimination(),
    SimplifyIndices(),
    OrderShapes(),
    NameFunctions(),
)
"""The passes after fusion, the same for extraction and deployment."""
