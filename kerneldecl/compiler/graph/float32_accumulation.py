"""Owns the pass by which half-precision operators compute in float32 inside, as torch's do.

Knows nothing of where a model comes from, nor of GEMMs, whose accumulators a model states.
"""

from __future__ import annotations

from typing import Any

from tvm import relax

from kerneldecl.compiler.graph.rewriting import Rewriter, graph_pass

HALF = ("float16", "bfloat16")
WIDE = frozenset(
    f"relax.{name}"
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "exp", "log", "power", "rsqrt", "sigmoid", "sin", "sinh", "tan",
        "tanh", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.softplus", "nn.log_softmax", "nn.softmax", "nn.batch_norm", "cumprod", "cumsum",
        "mean", "prod", "std", "sum", "variance", "nn.nll_loss", "nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d",
        "nn.adaptive_avg_pool3d", "nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d", "einsum",
    )
)  # fmt: skip
"""Operators that TVM would compute in half precision throughout: sums, and functions that round more than once. TVM's layer_norm,
rms_norm, group_norm, instance_norm and erf widen by themselves."""

_NORMS = frozenset({"relax.nn.group_norm", "relax.nn.instance_norm", "relax.nn.layer_norm", "relax.nn.rms_norm"})
"""TVM 0.27 lowers these for float16 and float32 alone: bfloat16 ones are cast here."""


@graph_pass
class AccumulateInFloat32(Rewriter):
    """Makes softmax, sums, means, batch norms and functions such as exp compute in float32 where their arguments are half-precision.

    Arguments are cast before and results after; dtypes of all other values stay. Run it after passes that look for operators, and
    before LegalizeOps. Accumulators of GEMMs are the model's choice: `out_dtype`.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        half = next((dtype for arg in call.args if (dtype := dtype_of(arg)) in HALF), "")
        return widened(self.builder_, call, half) if half and operator in (WIDE | _NORMS if half == "bfloat16" else WIDE) else call


def dtype_of(expr: Any) -> str:
    """Return the dtype of a tensor; empty for anything else."""
    ty = getattr(expr, "ty", None)
    return str(ty.dtype.dtype) if isinstance(ty, relax.TensorType) and ty.dtype is not None else ""


def widened(builder: Any, call: relax.Call, half: str) -> relax.Expr:
    """Return a call with its half-precision arguments cast to float32, and its results cast to `half`."""
    args = [builder.emit(relax.op.astype(arg, "float32")) if dtype_of(arg) in HALF else arg for arg in call.args]
    result = builder.emit(relax.Call(call.op, args, call.attrs, call.ty_args))
    if isinstance(result.ty, relax.TupleType):
        fields = [builder.emit(relax.TupleGetItem(result, place)) for place in range(len(result.ty.fields))]
        return relax.Tuple([_narrow(builder, field, half) for field in fields])
    return _narrow(builder, result, half)


def _narrow(builder: Any, x: Any, half: str) -> Any:
    return builder.emit(relax.op.astype(x, half)) if dtype_of(x) == "float32" else x
