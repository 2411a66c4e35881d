"""Owns the pass that finds norms and activations that a model writes out in smaller operators.

Knows nothing of rules, or of what follows.
"""

from __future__ import annotations

import math

import tvm
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.named_constants import scalar_of
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape


@graph_pass
class RecognizePatterns(Rewriter):
    """Makes one operator of rms_norm, layer_norm, gelu in both forms, silu, and the softmax that gives 0 for rows of -inf.

    - x * rsqrt(mean(x^2) + eps) * w, also as 1 / sqrt, and with casts to float32 around what is normalised
    - (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b
    - 0.5 * x * (1 + erf(x / sqrt(2))), 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) and x * sigmoid(x), factors in any order,
      the last also with casts to float32 around the sigmoid
    - torch's softmax of scores that no mask was added to: no row of them is all -inf
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        patterns = {
            "relax.multiply": (self._silu, self._gelu, self._rms_norm),
            "relax.add": (self._layer_norm,),
            "relax.where": (self._softmax,),
        }
        found = (pattern(call) for pattern in patterns.get(operator, ()))
        return next((each for each in found if each is not None), call)  # an expression has no truth value

    def _is_same(self, a: relax.Expr, b: relax.Expr) -> bool:
        return bool(self.known(a).same_as(self.known(b)))

    def _scalar(self, value: relax.Expr) -> float | None:
        return scalar_of(self.known(value))

    def _factors(self, value: relax.Expr) -> tuple[float, list[relax.Expr]]:
        """Return the number and the other factors of a product; dividing by a number is multiplying by its inverse."""
        number = self._scalar(value)
        if number is not None:
            return number, []
        product, quotient = self.producer(value, "relax.multiply"), self.producer(value, "relax.divide")
        if product is not None:
            (a, xs), (b, ys) = self._factors(product.args[0]), self._factors(product.args[1])
            return a * b, xs + ys
        divisor = self._scalar(quotient.args[1]) if quotient is not None else None
        if quotient is not None and divisor:
            a, xs = self._factors(quotient.args[0])
            return a / divisor, xs
        return 1.0, [self.known(value)]

    def _silu(self, call: relax.Call) -> relax.Expr | None:
        for x, gate in (call.args, call.args[::-1]):
            narrow = self.producer(gate, "relax.astype")
            sigmoid = self.producer(gate if narrow is None else narrow.args[0], "relax.sigmoid")
            if sigmoid is None:
                continue
            if narrow is None and self._is_same(sigmoid.args[0], x):
                return op.nn.silu(x)
            wide = self.producer(sigmoid.args[0], "relax.astype")
            if narrow is not None and wide is not None and self._is_same(wide.args[0], x) and dtype_of(wide) == "float32":
                return op.astype(self.emitted(op.nn.silu(wide)), dtype_of(call))
        return None

    def _gelu(self, call: relax.Call) -> relax.Expr | None:
        (left, xs), (right, ys) = self._factors(call.args[0]), self._factors(call.args[1])
        number, factors = left * right, xs + ys
        if not _is_close(number, 0.5) or len(factors) != 2:
            return None
        for x, gate in (factors, factors[::-1]):
            inner = self._plus_one(gate)
            if inner is None or dtype_of(x) != dtype_of(call):
                continue
            erf, tanh = self.producer(inner, "relax.erf"), self.producer(inner, "relax.tanh")
            if erf is not None:
                scale, of_x = self._factors(erf.args[0])
                if _is_close(scale, math.sqrt(0.5)) and len(of_x) == 1 and self._is_same(of_x[0], x):
                    return op.nn.gelu(x)
            if tanh is not None and self._is_tanh_argument(tanh.args[0], x):
                return op.nn.gelu_tanh(x)
        return None

    def _plus_one(self, value: relax.Expr) -> relax.Expr | None:
        total = self.producer(value, "relax.add")
        for inner, one in (total.args, total.args[::-1]) if total is not None else ():
            if self._scalar(one) == 1:
                return inner
        return None

    def _is_tanh_argument(self, value: relax.Expr, x: relax.Expr) -> bool:
        """Say whether a value is sqrt(2 / pi) * (x + 0.044715 * x^3)."""
        scale, factors = self._factors(value)
        total = self.producer(factors[0], "relax.add") if len(factors) == 1 and _is_close(scale, math.sqrt(2 / math.pi)) else None
        for linear, cubic in (total.args, total.args[::-1]) if total is not None else ():
            number, cube = self._factors(cubic)
            power = self.producer(cube[0], "relax.power") if len(cube) == 1 else None
            is_power = power is not None and self._scalar(power.args[1]) == 3 and self._is_same(power.args[0], x)
            is_product = len(cube) == 3 and all(self._is_same(each, x) for each in cube)
            if self._is_same(linear, x) and _is_close(number, 0.044715) and (is_power or is_product):
                return True
        return False

    def _rms_norm(self, call: relax.Call) -> relax.Expr | None:
        for weight, normalised in (call.args, call.args[::-1]):
            shape = static_shape(weight)
            narrow = self.producer(normalised, "relax.astype")
            product = self.producer(normalised if narrow is None else narrow.args[0], "relax.multiply")
            if product is None or shape is None or len(shape) != 1 or dtype_of(weight) != dtype_of(call):
                continue
            for x, factor in (product.args, product.args[::-1]):
                source, eps = self._without_cast(x), self._rms_epsilon(factor, x)
                if eps is not None and dtype_of(source) == dtype_of(call) and (static_shape(source) or (0,))[-1] == shape[0]:
                    return op.nn.rms_norm(source, weight, axes=[-1], epsilon=eps)
        return None

    def _rms_epsilon(self, factor: relax.Expr, x: relax.Expr) -> float | None:
        """Return eps of rsqrt(mean(x^2) + eps)."""
        total, eps = self._under_root(factor)
        mean = self.producer(total, "relax.mean") if total is not None else None
        return eps if mean is not None and _is_of_rows(mean) and self._is_square(mean.args[0], x) else None

    def _under_root(self, factor: relax.Expr) -> tuple[relax.Expr | None, float | None]:
        """Return what a value is 1 / sqrt(… + eps) of, and eps."""
        root, inverse = self.producer(factor, "relax.rsqrt"), self.producer(factor, "relax.divide")
        if root is None and inverse is not None and self._scalar(inverse.args[0]) == 1:
            root = self.producer(inverse.args[1], "relax.sqrt")
        return self._plus_epsilon(root.args[0]) if root is not None else (None, None)

    def _plus_epsilon(self, value: relax.Expr) -> tuple[relax.Expr | None, float | None]:
        total = self.producer(value, "relax.add")
        for inner, number in (total.args, total.args[::-1]) if total is not None else ():
            eps = self._scalar(number)
            if eps is not None and eps > 0:
                return inner, eps
        return None, None

    def _is_square(self, value: relax.Expr, x: relax.Expr) -> bool:
        power, product = self.producer(value, "relax.power"), self.producer(value, "relax.multiply")
        if power is not None:
            return self._scalar(power.args[1]) == 2 and self._is_same(power.args[0], x)
        return product is not None and all(self._is_same(each, x) for each in product.args)

    def _without_cast(self, value: relax.Expr) -> relax.Expr:
        wide = self.producer(value, "relax.astype")
        return wide.args[0] if wide is not None and dtype_of(wide) == "float32" else self.known(value)

    def _layer_norm(self, call: relax.Call) -> relax.Expr | None:
        for scaled, beta in (call.args, call.args[::-1]):
            product = self.producer(scaled, "relax.multiply")
            for normalised, gamma in (product.args, product.args[::-1]) if product is not None else ():
                found = self._normalised(normalised)
                if found is None or not all(static_shape(row) == _columns(call) for row in (gamma, beta)):
                    continue
                return op.nn.layer_norm(found[0], gamma, beta, axes=[-1], epsilon=found[1])
        return None

    def _normalised(self, value: relax.Expr) -> tuple[relax.Expr, float] | None:
        """Return x and eps of (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)."""
        quotient = self.producer(value, "relax.divide")
        root = self.producer(quotient.args[1], "relax.sqrt") if quotient is not None else None
        if quotient is None or root is None:
            return None
        inner, eps = self._plus_epsilon(root.args[0])
        variance = self.producer(inner, "relax.mean") if inner is not None else None
        centred = self.producer(quotient.args[0], "relax.subtract")
        if variance is None or centred is None or eps is None or not _is_of_rows(variance):
            return None
        mean = self.producer(centred.args[1], "relax.mean")
        is_of_x = mean is not None and _is_of_rows(mean) and self._is_same(mean.args[0], centred.args[0])
        return (centred.args[0], eps) if is_of_x and self._is_square(variance.args[0], quotient.args[0]) else None

    def _softmax(self, call: relax.Call) -> relax.Expr | None:
        """Return the softmax of where(no element of the row is > -inf, 0, softmax(scores))."""
        softmax, value = self.producer(call.args[2], "relax.nn.softmax"), call.args[0]
        chain = ("logical_not", "astype", "max", "astype", "logical_not", "equal")
        step = None
        for name in chain:
            step = self.producer(value, f"relax.{name}")
            if step is None:
                return None
            value = step.args[0]
        if softmax is None or step is None or not self._is_same(value, softmax.args[0]):
            return None
        return call.args[2] if self._scalar(step.args[1]) == -math.inf and self._is_product(softmax.args[0]) else None

    def _is_product(self, value: relax.Expr) -> bool:
        """Say whether a value is a matmul's, in another shape or multiplied by a number: nothing masks it."""
        for name in ("reshape", "multiply", "divide", "astype"):
            step = self.producer(value, f"relax.{name}")
            if step is not None and (name in {"reshape", "astype"} or self._scalar(step.args[1]) is not None):
                return self._is_product(step.args[0])
        return self.producer(value, "relax.matmul") is not None


def _columns(value: relax.Expr) -> tuple[int, ...] | None:
    """Return the last extent alone; None where it is not known."""
    shape = getattr(value.ty, "shape", None)
    last = shape.values[-1] if isinstance(shape, relax.ShapeExpr) and len(shape.values) else None
    return (int(last),) if isinstance(last, tvm.tirx.IntImm) else None


def _is_of_rows(mean: relax.Call) -> bool:
    """Say whether a mean is one over the last axis, which is kept."""
    rank = mean.args[0].ty.ndim
    return rank > 0 and bool(mean.attrs.keepdims) and [int(axis) % rank for axis in mean.attrs.axis or ()] == [rank - 1]


def _is_close(a: float, b: float) -> bool:
    """Say whether two numbers are one number, written in float16 or wider."""
    return abs(a - b) <= 1e-3 * abs(b)
