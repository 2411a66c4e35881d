"""Owns the pass that names the functions of a lowered module after where they stand in the model.

Knows nothing of rules, or of what functions compute but for the names that TVM gave them.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from typing import Any

import tvm
from tvm import relax

from kerneldecl.compiler.graph.named_constants import name_of
from kerneldecl.compiler.graph.places import PLACES, latest, parent, place_of_weight, places_of, shortened, symbol

_CALL_TIR = "relax.call_tir"
_ROTARY = ("strided_slice", "negative", "concatenate", "multiply")
"""What rotary embedding is made of: halves, one negated, put together again and multiplied by a table."""
_FORM = frozenset({"fused", "reshape", "expand", "dims", "squeeze", "cast", "tir", "te", "flatten", "broadcast", "to", "strided", "slice"})
"""Words of TVM's names that say nothing of what a function computes."""
_WORDS = 3


@tvm.transform.module_pass(opt_level=0, name="NameFunctions")
class NameFunctions:
    """Gives functions that fusion made a short name: the path of their weights in the model, or of what they read and what they do.

    `fused_reshape2_transpose1_multiply1_strided_slice2…` becomes layers.0.self_attn.rotary. The attribute "kerneldecl.places" has
    the path, the function's own name is the path as an identifier. Without a path the names of the first operators stay. Functions
    that have places keep them. Run it after FuseTIR.
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        rename = _Rename(mod)
        for name, found in _places(mod).items():
            rename.add(mod.get_global_var(name), mod[name].with_attr(PLACES, found), symbol(found[0]))
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rename.builder_.update_func(var, rename.visit_expr(func))
        return relax.transform.DeadCodeElimination()(rename.builder_.get())  # the functions under their former names


def _places(mod: tvm.IRModule) -> dict[str, list[str]]:
    """Return the places of each private function that has none yet, in order of its calls."""
    found: dict[str, list[str]] = defaultdict(list)
    taken = {place for func in mod.functions.values() for place in places_of(func)}
    for _, func in sorted(mod.functions_items(), key=lambda item: item[0].name_hint):
        if not isinstance(func, relax.Function):
            continue
        scopes: dict[Any, str] = {}
        for binding in itertools.chain.from_iterable(block.bindings for block in func.body.blocks):
            if not isinstance(binding, relax.VarBinding):
                continue
            value = binding.value
            weights = place_of_weight(map(name_of, _tensors(value)))
            read = latest(scopes, relax.analysis.free_vars(value))
            scopes[binding.var] = parent(weights) if weights else read
            callee = value.args[0] if _is_call_tir(value) else None
            if callee is None or not _can_be_renamed(mod, callee):
                continue
            name = str(callee.name_hint)
            place = shortened(weights or f"{read}.{_word(name)}".lstrip("."))
            found[name].append(next(each for each in _numbered(place) if each not in taken))
            taken.add(found[name][-1])
    return found


def _is_call_tir(value: Any) -> bool:
    return isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name == _CALL_TIR


def _can_be_renamed(mod: tvm.IRModule, var: Any) -> bool:
    func = mod[var]
    return isinstance(func, tvm.tirx.PrimFunc) and "global_symbol" not in (func.attrs or {}) and not places_of(func)


def _tensors(value: Any) -> list[Any]:
    """Return the arguments of a call; a tuple among them counts as what it holds."""
    args = value.args if isinstance(value, relax.Call) else []
    return [each for arg in args for each in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]


def _word(name: str) -> str:
    """Return what a function does, in at most a few words of the name that fusion gave it."""
    if all(part in name for part in _ROTARY):
        return "rotary"
    words = [re.sub(r"\d+$", "", word) if word not in {"conv1d", "conv2d", "conv3d"} else word for word in name.split("_")]
    said = [word for word, _ in itertools.groupby(word for word in words if word and word not in _FORM)]
    return "_".join(list(dict.fromkeys(said))[:_WORDS]) or next((word for word in words if word not in {"fused", "tir", "te"}), name)


def _numbered(name: str) -> Any:
    return itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))


@relax.expr_functor.mutator
class _Rename(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._renamed: dict[Any, Any] = {}

    def add(self, var: Any, func: Any, name: str) -> None:
        """Add a function under its new name; one that has it already gets the attributes."""
        if var.name_hint == name:
            self.builder_.update_func(var, func)
        else:
            self._renamed[var] = self.builder_.add_func(func, name)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not _is_call_tir(call) or call.args[0] not in self._renamed:
            return call
        return relax.Call(call.op, [self._renamed[call.args[0]], *call.args[1:]], call.attrs, call.ty_args)
