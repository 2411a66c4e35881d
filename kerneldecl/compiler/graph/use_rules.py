"""Owns the pass that replaces operators by calls of functions that standard rules lower to.

Knows nothing of patterns that a model writes out, of schedules or of artifacts.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict

import tvm
from tvm import relax

from kerneldecl.compiler import canonical
from kerneldecl.compiler.dynamic_shapes import ANY, BUCKET
from kerneldecl.compiler.graph.attention_rules import dynamic_attentions, find_attention
from kerneldecl.compiler.graph.contraction_rules import find_contraction
from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.element_rules import find_elements, find_gated, find_rotary
from kerneldecl.compiler.graph.group_norm_rule import find_group_norm
from kerneldecl.compiler.graph.named_constants import name_of
from kerneldecl.compiler.graph.places import NOTED, PLACES, REFUSED, RULE, latest, module_of, parent, place_of_weight, shortened, symbol
from kerneldecl.compiler.graph.rewriting import graph_pass, static_shape
from kerneldecl.compiler.graph.row_rules import find_reduction, find_rows
from kerneldecl.compiler.graph.rule_use import Found, Fuses, Made, Operand, Use, fuses_nothing
from kerneldecl.compiler.graph.view_rewriting import VIEWS, ViewRewriter
from kerneldecl.compiler.prim_funcs import OPAQUE

_ATTENTIONS = frozenset({"attention", "attention_decode"})
_FINDERS = (find_attention, find_contraction, find_group_norm, find_rows, find_reduction, find_rotary, find_gated, find_elements)
"""What finds rules, from the largest to the smallest: what one takes none behind it takes."""


@graph_pass
class UseRules(ViewRewriter):
    """Replaces operators by standard rules, so that what is extracted and what is deployed is what a rule lowers to.

    - scores, scale, masks, softmax and context: `attention`, where `fuses` says of the rule that the target has a fused kernel, or
      `attention_decode` where the mask says lengths; why others are left apart is the module's attribute "kerneldecl.refused"
    - a matmul of two or three axes, with the transposes of operands and result as its layout or as interleaved heads, and what follows
      it (a scale, a bias, an activation, a residual, a factor) as its epilogue: `matmul`
    - a convolution with channels last and the same epilogue: `conv1d`, `conv2d`, `conv3d` or `conv2d_transpose`, constant weights of
      `conv2d` in panels where `fuses` says that of this rule
    - group and instance norms with the activation after them: `group_norm`
    - layer_norm, rms_norm and softmax: the rules of these names, which compute 16-bit values in float32
    - sums and means of 16-bit values: `reduce`
    - rotary embedding of heads: `rotary`; silu(x) * y where no epilogue computes it: `elementwise`
    - transposes and operators of elements between such functions, which nothing else could be fused with: `transpose`, `elementwise`

    A function is named after the place of its weights in the model, or of what it reads. Functions that several places call
    are one; their attribute "kerneldecl.places" has all. FuseOps leaves them as they are. Run NormalizeViews before.
    """

    def __init__(self, mod: tvm.IRModule | None = None, fuses: Fuses = fuses_nothing) -> None:
        super().__init__(mod)
        self._fuses = functools.cache(fuses)  # layers ask the same
        self._refused: list[str] = []
        self._noted: list[str] = []
        self._functions: dict[str, relax.GlobalVar] = {}
        self._places: dict[str, list[str]] = defaultdict(list)

    def rewritten_module(self, mod: tvm.IRModule) -> tvm.IRModule:
        fresh = super().rewritten_module(mod)
        for var, func in fresh.functions_items():
            if str((func.attrs or {}).get(RULE)) in self._places:
                fresh.update_func(var, func.with_attr(PLACES, self._places[str(func.attrs[RULE])]))
        said = {name: texts for name, texts in ((REFUSED, self._refused), (NOTED, self._noted)) if texts}
        return fresh.with_attrs(said) if said else fresh

    def begin(self, func: relax.Function) -> None:
        super().begin(func)
        self._found = Found(Dataflow.of(func), {}, set(), self._fuses)
        self._scopes: dict[relax.Var, str] = {}
        self._shared: dict[tuple[relax.Expr, str], relax.Expr] = {}
        # The copy for other sizes than those that are declared has none to declare.
        if (func.attrs or {}).get(BUCKET) != ANY:
            self._found.refused |= dynamic_attentions(self._found.graph)
        for find in _FINDERS:
            for var in list(self._found.graph.values):
                call = self._found.graph.call(var)
                if call is not None and var not in self._found.taken and static_shape(call) is not None:
                    find(self._found, var, call)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        use = self._found.uses.get(binding.var)
        for texts, reasons in ((self._refused, self._found.refused), (self._noted, self._found.noted)):
            if binding.var in reasons:
                read = latest(self._scopes, relax.analysis.free_vars(binding.value))
                texts.append(f"{shortened(module_of(read, 'attention')) or 'attention'}: {reasons[binding.var]}")
        if use is None:
            self._scopes[binding.var] = latest(self._scopes, relax.analysis.free_vars(binding.value))
            if binding.var not in self._found.taken:
                super().visit_var_binding_(binding)
            return
        *wanted, out = use.instance.signature().args
        operands = [self._in_shape(self._operand(operand), arg.shape) for operand, arg in zip(use.operands, wanted, strict=True)]
        call = relax.call_tir(self._function(use, binding.var), operands, relax.TensorType(out.shape, out.dtype))
        shape = static_shape(binding.var)
        if use.written is not None:
            super().visit_var_binding_(relax.VarBinding(binding.var, self.viewed(self.emitted(call), use.written)))
        elif out.shape == shape:
            super().visit_var_binding_(relax.VarBinding(binding.var, call))
        else:
            reshaped = relax.op.reshape(self.emitted(call), shape)
            super().visit_var_binding_(relax.VarBinding(binding.var, self.builder_.normalize(reshaped)))

    def _operand(self, operand: Operand) -> relax.Expr:
        if not isinstance(operand, Made):
            return self.visit_expr(operand)
        if not operand.name:
            return operand.make(self, self.visit_expr(operand.source))
        key = operand.source, operand.name
        if key not in self._shared:
            self._shared[key] = operand.make(self, self.visit_expr(operand.source))
        return self._shared[key]

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        shape = static_shape(call)
        return self._in_shape(call.args[0], shape) if operator == "relax.reshape" and shape is not None else call

    def _in_shape(self, operand: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        """Return an operand in another shape, by one reshape at most: FuseOps would make a kernel of two."""
        while (before := self.producer(operand, "relax.reshape")) is not None:
            operand = before.args[0]
        return operand if static_shape(operand) == shape else self.emitted(relax.op.reshape(operand, shape))

    def _function(self, use: Use, last: relax.Var) -> relax.GlobalVar:
        """Return the function of a rule; the first place that calls it names it."""
        text = json.dumps({"rule": use.rule, "attrs": use.attrs})
        place = self._place(use, last)
        if text not in self._functions:
            func = canonical.lower(use.instance)["main"].without_attr("global_symbol").with_attr("op_pattern", OPAQUE).with_attr(RULE, text)
            self._functions[text] = self.builder_.add_func(func, symbol(place))
        taken = {other for others in self._places.values() for other in others}
        numbered = (place if number == 1 else f"{place}_{number}" for number in range(1, len(taken) + 2))
        self._places[text].append(next(each for each in numbered if each not in taken))
        return self._functions[text]

    def _place(self, use: Use, last: relax.Var) -> str:
        """Return the path of a function's weights; for one without weights that of what it reads, and its rule."""
        place = "" if use.rule in _ATTENTIONS else place_of_weight(map(name_of, use.sources[1:]))
        read = latest(self._scopes, (each for each in use.sources if isinstance(each, relax.Var)))
        self._scopes[last] = parent(place) if place else read
        if use.rule in _ATTENTIONS:
            return shortened(module_of(read, "attention") or "attention")
        return shortened(place or f"{read}.{self._word(use, last)}".lstrip("."))

    def _word(self, use: Use, last: relax.Var) -> str:
        """Return what a function without weights does, in a word."""
        if use.rule == "elementwise":
            return str(use.attrs["op"])
        if use.rule == "matmul" and "batch" in use.attrs:
            if self._is_scores(last):
                return "scores"
            given = self._found.uses.get(use.sources[0]) if isinstance(use.sources[0], relax.Var) else None
            return "context" if given is not None and given.rule == "softmax" else "matmul"
        return use.rule

    def _is_scores(self, value: relax.Var) -> bool:
        """Say whether a softmax reads a value, masked or not."""
        graph, reader = self._found.graph, self._found.graph.only_reader(value)
        while reader is not None and graph.operator(reader) in {"relax.add", "relax.astype", *VIEWS}:
            reader = graph.only_reader(reader)
        return reader is not None and graph.operator(reader) == "relax.nn.softmax"
