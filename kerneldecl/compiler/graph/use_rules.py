"""Owns the pass that replaces operators by calls of functions that standard rules lower to.

Knows nothing of patterns that a model writes out, of schedules or of artifacts.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from kerneldecl.compiler import canonical
from kerneldecl.compiler.graph.activations import ACTIVATIONS, Activation, activation_of
from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.named_constants import constant, name_of, scalar_of
from kerneldecl.compiler.graph.normalize_views import axes_of
from kerneldecl.compiler.graph.places import PLACES, RULE, latest, parent, place_of_weight, shortened, symbol
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.declare.rule_attributes import RuleAttributes, rule_attributes
from kerneldecl.plugins.find import STANDARD
from kerneldecl.rule import Rule

_OPAQUE = 8
"""TVM's kind of a function that FuseOps leaves as it is."""
_HALVES = frozenset({"float16", "bfloat16"})
_FLOATS = _HALVES | {"float32", "float64"}
_BINARY = {"relax.add": "add", "relax.multiply": "mul", "relax.subtract": "sub", "relax.divide": "div"}
_UNARY = {**ACTIVATIONS, "relax.exp": "exp", "relax.sqrt": "sqrt"}
_ACTIVATION_STEPS = frozenset({*ACTIVATIONS.values(), "relu6", "hard_sigmoid", "hard_swish"})


@tvm.transform.module_pass(opt_level=0, name="UseRules")
class UseRules:
    """Replaces operators by standard rules, so that what is extracted and what is deployed is what a rule lowers to.

    - a matmul of two or three axes, with the transposes of its operands as its layout, and what follows it (a scale, a bias, an
      activation, a residual) as its epilogue: `matmul`
    - a convolution of NHWC images with the same epilogue: `conv2d`
    - layer_norm, rms_norm and softmax: the rules of these names, which compute 16-bit values in float32
    - sums and means of 16-bit values: `reduce`
    - transposes and operators of elements between such functions, which nothing else could be fused with: `transpose`, `elementwise`

    A function is named after the place of its weights in the model, or of what it reads. Functions that several places call
    are one; their attribute "kerneldecl.places" has all. FuseOps leaves them as they are. Run NormalizeViews before.
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        return _UseRules(mod).module(mod)


@dataclass(frozen=True)
class Use:
    """A rule in place of the operators that end in a variable."""

    rule: str
    attrs: Mapping[str, Any]
    operands: tuple[relax.Expr, ...]
    replaced: tuple[relax.Var, ...] = ()
    """Variables before the last one, which nothing else reads."""


class _Uses:
    """Finds the rules of a function, from the largest to the smallest."""

    def __init__(self, graph: Dataflow) -> None:
        self.graph = graph
        self.found: dict[relax.Var, Use] = {}
        self.taken: set[relax.Var] = set()
        for find in (self._accumulating, self._rows, self._reduction, self._single):
            for var in list(graph.values):
                call = graph.call(var)
                if call is None or var in self.taken or static_shape(call) is None:
                    continue
                for last, use in find(var, call):
                    self.found[last] = use
                    self.taken |= {last, *use.replaced}

    def _accumulating(self, var: relax.Var, call: relax.Call) -> Iterator[tuple[relax.Var, Use]]:
        """Yield the longest epilogue of a matmul or a convolution that the rule takes."""
        sizes = self._sizes(call) if call.op.name == "relax.matmul" else _window(call) if call.op.name == "relax.nn.conv2d" else None
        if sizes is None:
            return
        attrs, operands = sizes
        rule = "matmul" if call.op.name == "relax.matmul" else "conv2d"
        chain = [(var, Use(rule, {**attrs, **_out(attrs, dtype_of(call))}, operands))]
        while (longer := self._longer(*chain[-1])) is not None:
            chain.append(longer)
        accepted = next(((last, use) for last, use in reversed(chain) if _is_accepted(use, last)), None)
        if accepted is not None:
            yield accepted

    def _sizes(self, call: relax.Call) -> tuple[dict[str, Any], tuple[relax.Expr, ...]] | None:
        """Return the sizes and the layout of a matmul, and its operands before their transposes."""
        (a, transposed_a), (b, transposed_b) = map(self._unswapped, call.args)
        of_a, of_b = static_shape(call.args[0]) or (), static_shape(call.args[1]) or ()
        dtype = dtype_of(a)
        if len(of_a) != len(of_b) or len(of_a) not in {2, 3} or of_a[:-2] != of_b[:-2] or dtype != dtype_of(b) or dtype not in _FLOATS:
            return None
        attrs = {"m": of_a[-2], "n": of_b[-1], "k": of_a[-1], **({"batch": of_a[0]} if len(of_a) == 3 else {})}
        layout = ("t" if transposed_a else "n") + ("t" if transposed_b else "n")
        return attrs | ({} if layout == "nn" else {"layout": layout}) | _dtype(dtype), (a, b)

    def _unswapped(self, operand: relax.Expr) -> tuple[relax.Expr, bool]:
        swap = self.graph.call(operand)
        if swap is None or swap.op.name != "relax.permute_dims":
            return operand, False
        axes = axes_of(swap)
        is_swap = axes == (*range(len(axes) - 2), len(axes) - 1, len(axes) - 2)
        return (swap.args[0], True) if is_swap else (operand, False)

    def _longer(self, last: relax.Var, use: Use) -> tuple[relax.Var, Use] | None:
        """Return a use with one more step of its epilogue, and what it gives; None where what reads it is none."""
        steps = tuple(use.attrs.get("epilogue", ()))
        found = activation_of(self.graph, last) or self._wide_activation(last)
        if found is not None and not _ACTIVATION_STEPS & set(steps):
            *inner, end = found.variables
            attrs = {**use.attrs, "epilogue": (*steps, found.name)}
            return end, Use(use.rule, attrs, use.operands, (*use.replaced, last, *inner))
        reader = self.graph.only_reader(last)
        call = self.graph.call(reader) if reader not in self.taken else None
        if reader is None or call is None:
            return None
        name, dtype = str(call.op.name), str(use.attrs.get("dtype", "float32"))
        if name == "relax.astype" and dtype in _HALVES and dtype_of(last) == "float32" and dtype_of(call) == dtype:
            kept = {key: value for key, value in use.attrs.items() if key != "out_dtype"}
            return reader, Use(use.rule, kept, use.operands, (*use.replaced, last))
        step, operand = self._step(call, name, last)
        if not step or step in steps:
            return None
        return reader, Use(use.rule, {**use.attrs, "epilogue": (*steps, step)}, (*use.operands, operand), (*use.replaced, last))

    def _wide_activation(self, last: relax.Var) -> Activation | None:
        """Return an activation of a 16-bit value that is cast to float32 before it and back after it, with the casts; None for another."""
        wide = self.graph.only_reader(last)
        if wide is None or self.graph.operator(wide) != "relax.astype" or (dtype_of(last) not in _HALVES or dtype_of(wide) != "float32"):
            return None
        found = activation_of(self.graph, wide)
        narrow = self.graph.only_reader(found.variables[-1]) if found is not None else None
        if found is None or narrow is None or self.graph.operator(narrow) != "relax.astype" or dtype_of(narrow) != dtype_of(last):
            return None
        return Activation(found.name, (wide, *found.variables, narrow))

    def _step(self, call: relax.Call, name: str, last: relax.Var) -> tuple[str, relax.Expr]:
        """Return the step of two operands that an operator is after the value `last`, and its other operand."""
        if name not in {"relax.add", "relax.multiply", "relax.divide"} or len(call.args) != 2:
            return "", last
        is_first = isinstance(call.args[0], relax.Var) and call.args[0].same_as(last)
        other = call.args[1 if is_first else 0]
        number = scalar_of(other)
        if name == "relax.add":
            shape, whole = static_shape(other), static_shape(call) or ()
            return ("add" if shape == whole else "bias" if shape == whole[-1:] else ""), other
        if number is None or not number or (name == "relax.divide" and not is_first):
            return "", last
        return "scale", constant(_one(number if name == "relax.multiply" else 1 / number), "float32")

    def _rows(self, var: relax.Var, call: relax.Call) -> Iterator[tuple[relax.Var, Use]]:
        """Yield the norm or softmax that a call is, with the casts around a softmax that a model computes in float32."""
        name, shape, dtype = str(call.op.name), static_shape(call) or (), dtype_of(call)
        given = {"shape": shape, **_dtype(dtype)}
        if name == "relax.nn.softmax":
            axis = int(call.attrs.axis) % len(shape)
            axis_of = {} if axis == len(shape) - 1 else {"axis": axis}
            if (half := self._half_around(var, call)) is not None:
                yield half
                return
            use = Use("softmax", {**given, **axis_of}, (call.args[0],))
        elif name in {"relax.nn.layer_norm", "relax.nn.rms_norm"} and [int(axis) % len(shape) for axis in call.attrs.axes] == [
            len(shape) - 1
        ]:
            use = Use(name.rpartition(".")[2], {**given, "eps": float(call.attrs.epsilon)}, tuple(call.args))
            if name == "relax.nn.layer_norm" and not (call.attrs.center and call.attrs.scale):
                return
        else:
            return
        if _is_accepted(use, var):
            yield var, use

    def _half_around(self, var: relax.Var, call: relax.Call) -> tuple[relax.Var, Use] | None:
        """Return the softmax of 16-bit values that a model casts to float32 before it and back after it; None for another."""
        casts = self._casts(var, call)
        if casts is None:
            return None
        x, narrow = casts
        shape = static_shape(call) or ()
        axis = int(call.attrs.axis) % len(shape)
        axis_of = {} if axis == len(shape) - 1 else {"axis": axis}
        return narrow, Use("softmax", {"shape": shape, "dtype": dtype_of(x), **axis_of}, (x,), (var,))

    def _casts(self, var: relax.Var, call: relax.Call) -> tuple[relax.Expr, relax.Var] | None:
        """Return the 16-bit value that is cast to float32 before a call, and what its result is cast to; None without such casts."""
        wide, narrow = self.graph.call(call.args[0]), self.graph.only_reader(var)
        if wide is None or narrow is None or wide.op.name != "relax.astype" or self.graph.operator(narrow) != "relax.astype":
            return None
        dtype = dtype_of(narrow)
        is_half = dtype in _HALVES and dtype_of(wide.args[0]) == dtype and dtype_of(call) == "float32"
        return (wide.args[0], narrow) if is_half else None

    def _reduction(self, var: relax.Var, call: relax.Call) -> Iterator[tuple[relax.Var, Use]]:
        """Yield the sum or mean of 16-bit values, which accumulates in float32; one of float32 may be fused with what is before it."""
        if call.op.name not in {"relax.sum", "relax.mean"}:
            return
        casts = self._casts(var, call)
        x, last, replaced = (call.args[0], var, ()) if casts is None else (*casts, (var,))
        shape = static_shape(x)
        if shape is None or dtype_of(x) not in _HALVES:
            return
        axes = range(len(shape)) if call.attrs.axis is None else sorted(int(axis) % len(shape) for axis in call.attrs.axis)
        kept = {"keepdims": True} if call.attrs.keepdims else {}
        attrs = {"op": str(call.op.name).rpartition(".")[2], "shape": shape, "axes": tuple(axes), "dtype": dtype_of(x), **kept}
        use = Use("reduce", attrs, (x,), replaced)
        if _is_accepted(use, last):
            yield last, use

    def _single(self, var: relax.Var, call: relax.Call) -> Iterator[tuple[relax.Var, Use]]:
        """Yield the transpose or the operator of elements that a call is, where only rules are around it."""
        name, shape = str(call.op.name), static_shape(call) or ()
        tensors = [arg for arg in call.args if isinstance(getattr(arg, "ty", None), relax.TensorType)]
        if not shape or not all(map(self._is_given, tensors)) or not self._is_for_rules(var):
            return
        if name == "relax.permute_dims" and len(shape) <= 4:
            given = static_shape(call.args[0]) or ()
            use = Use("transpose", {"shape": given, "axes": axes_of(call), **_dtype(dtype_of(call))}, (call.args[0],))
        elif name in {**_BINARY, **_UNARY} and all(static_shape(each) == shape for each in tensors):
            use = Use("elementwise", {"op": {**_BINARY, **_UNARY}[name], "shape": shape, **_dtype(dtype_of(call))}, tuple(call.args))
        else:
            return
        if _is_accepted(use, var):
            yield var, use

    def _is_given(self, value: relax.Expr) -> bool:
        """Say whether a rule gives a value, or the caller: nothing is there to be fused with."""
        while self.graph.operator(value) == "relax.reshape":
            value = self.graph.call(value).args[0]  # type: ignore[union-attr]
        return value in self.found or (isinstance(value, relax.Var) and value not in self.graph.values)

    def _is_for_rules(self, var: relax.Var) -> bool:
        """Say whether rules alone read a value, in whatever shape or layout."""
        for reader in self.graph.readers[var]:
            if reader is None or reader in self.taken:
                continue
            is_swap = self.graph.operator(reader) == "relax.permute_dims" and self._unswapped(reader)[1]
            is_view = self.graph.operator(reader) == "relax.reshape" or (is_swap and self._is_for_rules(reader))
            if not (is_view and self._is_for_rules(reader)):
                return False
        return True


def _window(call: relax.Call) -> tuple[dict[str, Any], tuple[relax.Expr, ...]] | None:
    """Return the sizes of a convolution of NHWC images with one stride, padding and dilation, and its operands; None for another."""
    attrs = call.attrs
    image, kernel = (static_shape(arg) for arg in call.args)
    dtype = dtype_of(call.args[0])
    if (attrs.data_layout, attrs.kernel_layout) != ("NHWC", "HWIO") or attrs.out_layout not in {"", "NHWC"} or dtype not in _FLOATS:
        return None
    window = {name: {int(each) for each in getattr(attrs, of)} for name, of in (("stride", "strides"), ("padding", "padding"))}
    window["dilation"] = {int(each) for each in attrs.dilation}
    if image is None or kernel is None or dtype != dtype_of(call.args[1]) or any(len(sides) > 1 for sides in window.values()):
        return None
    sizes = dict(zip("nhwc", image, strict=True)) | {"f": kernel[3], "kh": kernel[0], "kw": kernel[1]}
    given = {name: side for name, sides in window.items() for side in sides if side != (0 if name == "padding" else 1)}
    groups = {"groups": int(attrs.groups)} if int(attrs.groups) > 1 else {}
    return {**sizes, **given, **groups, **_dtype(dtype)}, tuple(call.args)


def _one(number: float) -> Any:
    import numpy as np

    return np.array([number], "float32")


def _dtype(dtype: str) -> dict[str, str]:
    return {} if dtype == "float32" else {"dtype": dtype}


def _out(attrs: Mapping[str, Any], dtype: str) -> dict[str, str]:
    return {} if dtype == attrs.get("dtype", "float32") else {"out_dtype": dtype}


@functools.cache
def _standard(rule: str) -> RuleAttributes:
    return rule_attributes(STANDARD, rule)


def _instance(use: Use) -> Rule:
    return _standard(use.rule).rule(**use.attrs)


def _is_accepted(use: Use, last: relax.Var) -> bool:
    """Say whether a rule takes the attributes, with the arguments that the operators have."""
    standard = _standard(use.rule)
    if any(standard.attributes[name].read(value)[1] for name, value in use.attrs.items()):
        return False
    instance = _instance(use)
    if any(instance.problems()):
        return False
    signature = instance.signature()
    got = [(static_shape(each), dtype_of(each)) for each in (*use.operands, last)]
    return got == [(arg.shape, arg.dtype) for arg in signature.args]


@relax.expr_functor.mutator
class _UseRules(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._functions: dict[str, Any] = {}
        self._places: dict[str, list[str]] = defaultdict(list)
        self._uses: _Uses
        self._scopes: dict[relax.Var, str] = {}

    def module(self, mod: tvm.IRModule) -> tvm.IRModule:
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function) and not (func.attrs or {}).get("Primitive"):
                self._uses = _Uses(Dataflow.of(func))
                self._scopes = {}
                self.builder_.update_func(var, self.visit_expr(func))
        fresh = relax.transform.DeadCodeElimination()(self.builder_.get())
        for var, func in fresh.functions_items():
            if RULE in (func.attrs or {}):
                fresh.update_func(var, func.with_attr(PLACES, self._places[str(func.attrs[RULE])]))
        return fresh

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        use = self._uses.found.get(binding.var)
        if use is None:
            self._scopes[binding.var] = latest(self._scopes, relax.analysis.free_vars(binding.value))
            if binding.var not in self._uses.taken:
                super().visit_var_binding_(self._as_view(binding))
            return
        call = relax.call_tir(self._function(use, binding.var), list(use.operands), binding.var.ty)
        super().visit_var_binding_(relax.VarBinding(binding.var, call))

    def _as_view(self, binding: relax.VarBinding) -> relax.VarBinding:
        """Return the binding of a reshape that the function returns as one of a variable: RewriteDataflowReshape leaves out outputs."""
        is_output = not isinstance(binding.var, relax.DataflowVar) and self.builder_.current_block_is_dataflow()
        if not is_output or self._uses.graph.operator(binding.var) != "relax.reshape":
            return binding
        return relax.VarBinding(binding.var, self.builder_.emit(self.visit_expr(binding.value)))

    def _function(self, use: Use, last: relax.Var) -> relax.GlobalVar:
        """Return the function of a rule; the first place that calls it names it."""
        text = json.dumps({"rule": use.rule, "attrs": use.attrs})
        place = self._place(use, last)
        if text not in self._functions:
            func = (
                canonical.lower(_instance(use))["main"].without_attr("global_symbol").with_attr("op_pattern", _OPAQUE).with_attr(RULE, text)
            )
            self._functions[text] = self.builder_.add_func(func, symbol(place))
        taken = {other for others in self._places.values() for other in others}
        numbered = (place if number == 1 else f"{place}_{number}" for number in range(1, len(taken) + 2))
        self._places[text].append(next(each for each in numbered if each not in taken))
        return self._functions[text]

    def _place(self, use: Use, last: relax.Var) -> str:
        """Return the path of a function's weights; for one without weights that of what it reads, and its rule."""
        place = place_of_weight(map(name_of, use.operands[1:]))
        read = latest(self._scopes, (each for each in use.operands if isinstance(each, relax.Var)))
        self._scopes[last] = parent(place) if place else read
        return shortened(place or f"{read}.{self._word(use, last)}".lstrip("."))

    def _word(self, use: Use, last: relax.Var) -> str:
        """Return what a function without weights does, in a word."""
        if use.rule == "elementwise":
            return str(use.attrs["op"])
        if use.rule == "matmul" and "batch" in use.attrs:
            readers = {reader for reader in self._uses.graph.readers[last] if reader is not None}
            if any(self._uses.found[reader].rule == "softmax" for reader in readers if reader in self._uses.found):
                return "scores"
            given = self._uses.found.get(use.operands[0]) if isinstance(use.operands[0], relax.Var) else None
            return "context" if given is not None and given.rule == "softmax" else "matmul"
        return use.rule
