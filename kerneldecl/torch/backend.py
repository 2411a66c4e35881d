"""Owns the backend of torch.compile: graphs that can be compiled run on our kernels, others as torch runs them.

Knows nothing of how a module is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kerneldecl.errors import KerneldeclError
from kerneldecl.torch.compile import CompiledModule, compile_module

_REFUSALS = (
    KerneldeclError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What export, import, tuning and TVM raise for a graph that they do not take; for this backend each means: eager."""
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Return what runs a graph: `torch.compile(module, backend="kerneldecl", options={"target": "h200"}, dynamic=False)`.

    A graph whose result differs from torch's on the example inputs is run by torch, too. Weights are inputs here, so that a training step
    between two calls is seen; `kerneldecl.torch.compile` takes them in once, which is faster.
    """
    try:
        reason, compiled = _compiled(graph, example_inputs, **options.get("options", options))
    except _REFUSALS as error:
        reason, compiled = (str(error).strip().splitlines() or [type(error).__name__])[-1], None
    if compiled is None:
        warnings.warn(f"kerneldecl leaves a graph to torch: {reason}", RuntimeWarning, stacklevel=2)
        eager: Callable[..., Any] = graph.forward
        return eager
    return compiled


def _compiled(graph: torch.fx.GraphModule, inputs: Sequence[Any], target: str | None = None) -> tuple[str, CompiledModule | None]:
    if any(not isinstance(each, torch.Tensor) for each in inputs):
        return "it has inputs of dynamic size; compile with dynamic=False", None
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        return "it needs gradients; call it under torch.no_grad()", None
    detached = [each.detach() for each in inputs]
    compiled = compile_module(_tupled(graph), detached, target)
    want, got = graph(*detached), compiled(*detached)
    pairs = zip(want, got, strict=True)
    if not all(torch.allclose(g, w, _TOLERANCES.get(w.dtype, 0), _TOLERANCES.get(w.dtype, 0), equal_nan=True) for w, g in pairs):
        return "the compiled graph's result differs from torch's", None
    return "", compiled


def _tupled(graph: torch.fx.GraphModule) -> torch.nn.Module:
    """Return the graph as a module in eval mode: what dynamo hands over has no mode of its own."""
    return graph.eval()
