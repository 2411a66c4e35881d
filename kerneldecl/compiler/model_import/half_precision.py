"""Owns the pass that makes a half-precision model of a float32 one.

Knows nothing of where the model comes from, nor of kernels.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import tvm
from tvm import relax

from kerneldecl.compiler.graph.batch_norm import FoldBatchNorm
from kerneldecl.compiler.graph.constants import FoldConstants
from kerneldecl.compiler.graph.float32_accumulation import WIDE, dtype_of, widened
from kerneldecl.compiler.model_import.recurrent_steps import in_dtype_of

HalfDtype = Literal["float16", "bfloat16"]
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
_CONTRACTIONS = frozenset(
    {
        "relax.matmul",
        "relax.nn.conv1d",
        "relax.nn.conv2d",
        "relax.nn.conv3d",
        "relax.nn.conv1d_transpose",
        "relax.nn.conv2d_transpose",
        "relax.nn.conv3d_transpose",
    }
)
_FLOAT16_ALONE = frozenset({"relax.nn.group_norm", "relax.nn.instance_norm"})
"""Norms that TVM 0.27 has in float16 and float32, not in bfloat16."""
_IN_FLOAT32 = (relax.transform.CanonicalizeBindings(), FoldConstants(), FoldBatchNorm())
"""Passes that come first: weights are rounded once, after a batch norm was folded into them."""


@tvm.transform.module_pass(opt_level=0, name="HalfPrecision")
class HalfPrecision:
    """Makes a float32 model a half-precision one: `HalfPrecision("float16")(mod)` returns the module.

    - Parameters, results and weights of float32 become `dtype`; weights are stored so. Finite weights beyond its range become its
      largest number.
    - GEMMs and convolutions take half-precision operands, accumulate in float32 and are rounded once.
    - Softmax, norms, sums and functions such as exp compute in float32: they are cast before and after.
    - What is computed of integers and small constants alone, such as the angles of rotary embeddings, stays float32 until it meets
      data: positions beyond 2048 have no place in float16.

    float64 and integers stay. TVM's ToMixedPrecision knows float16 alone, and leaves weights and parameters in float32.
    Give it the weights (`relax.transform.BindParams`) or have them as parameters; run it before LegalizeOps.
    """

    def __init__(self, dtype: HalfDtype) -> None:
        if dtype not in get_args(HalfDtype):
            raise ValueError(f'dtype "{dtype}" is no half precision; expected "float16" or "bfloat16"')
        self.dtype = dtype

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        folded = tvm.transform.Sequential(_IN_FLOAT32)(mod)
        half = _HalfPrecision(folded, self.dtype)
        for var, func in folded.functions_items():
            if isinstance(func, relax.Function) and not (func.attrs or {}).get("Primitive"):
                half.builder_.update_func(var, half.visit_expr(func))
        return half.builder_.get()


def half_precision(mod: tvm.IRModule, dtype: str) -> tvm.IRModule:
    passed: Any = HalfPrecision  # a pass by its decorator, of which the type checker knows nothing
    return passed(dtype)(mod)


@relax.expr_functor.mutator
class _HalfPrecision(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, mod: tvm.IRModule, dtype: str) -> None:
        super().__init__(mod)
        self._dtype = dtype
        self._constants: dict[Any, Any] = {}
        self._functions = dict(mod.functions_items())

    def visit_function_(self, func: relax.Function) -> relax.Function:
        params = [self._param(param) for param in func.params]
        for old, new in zip(func.params, params, strict=True):
            self.set_var_remap(old, new)
        return relax.Function(params, self.visit_with_new_scope(func.body), None, func.is_pure, func.attrs)

    def _param(self, param: Any) -> Any:
        return relax.Var(param.name, relax.TensorType(param.ty.shape, self._dtype)) if dtype_of(param) == "float32" else param

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        # Not the superclass's visit: it checks dtypes, of which only some are half-precision before this call is.
        call = relax.Call(call.op, [self.visit_expr(arg) for arg in call.args], call.attrs, call.ty_args)
        name = str(call.op.name) if isinstance(call.op, tvm.ir.Op) else ""
        half = any(self._is_data(arg) for arg in _tensors(call.args))
        if name == "relax.astype" and str(call.attrs.dtype) == "float32" and half and dtype_of(call.args[0]) == self._dtype:
            return call.args[0]
        if not half:
            return call
        args = [self._as_half(arg) for arg in call.args]
        if not name.startswith("relax.") or name.startswith(("relax.call_", "relax.builtin.", "relax.vm.", "relax.memory.")):
            made = in_dtype_of(self.builder_, self._functions[call.args[0]], args[1]) if name == "relax.call_tir" else None
            return widened(self.builder_, relax.Call(call.op, args, call.attrs, call.ty_args), self._dtype) if made is None else made
        if name in _CONTRACTIONS and dtype_of(args[0]) == self._dtype:
            product = self.builder_.emit(relax.Call(call.op, args, _with_out_dtype(call.attrs), call.ty_args))
            return relax.op.astype(product, self._dtype)
        narrow = relax.Call(call.op, args, call.attrs, call.ty_args)
        if name in (WIDE | _FLOAT16_ALONE if self._dtype == "bfloat16" else WIDE):
            return widened(self.builder_, narrow, self._dtype)
        result = self.builder_.normalize(narrow)
        return relax.op.astype(self.builder_.emit(result), self._dtype) if dtype_of(result) == "float32" else result

    def _is_data(self, arg: Any) -> bool:
        """Say whether a value is half-precision already, or a weight: a constant of two axes or more."""
        return dtype_of(arg) == self._dtype or (isinstance(arg, tvm.ir.GenericConst) and dtype_of(arg) == "float32" and arg.value.ndim >= 2)

    def _as_half(self, arg: Any) -> Any:
        if isinstance(arg, relax.Tuple):
            return relax.Tuple([self._as_half(field) for field in arg.fields])
        if dtype_of(arg) != "float32":
            return arg
        if not isinstance(arg, tvm.ir.GenericConst):
            return self.builder_.emit(relax.op.astype(arg, self._dtype))
        if arg not in self._constants:
            self._constants[arg] = _half_constant(arg, self._dtype)
        return self._constants[arg]


def _tensors(args: Any) -> list[Any]:
    return [each for arg in args for each in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]


def _half_constant(constant: Any, dtype: str) -> Any:
    """Return a constant rounded to half precision, with its name; finite values stay finite."""
    array = constant.value.numpy()
    limit = _LARGEST[dtype]
    clipped = np.where(np.isfinite(array), np.clip(array, -limit, limit), array)
    rounded = relax.const(clipped.astype(np.float32), dtype)
    return rounded if constant.span is None else tvm.ir.GenericConst(rounded.value, rounded.ty, constant.span)


def _with_out_dtype(attrs: Any) -> Any:
    info = type(attrs).__tvm_ffi_type_info__
    fields = {field.name: getattr(attrs, field.name) for field in info.fields}
    return tvm.ir.make_node(info.type_key, **{**fields, "out_dtype": "float32"})
