"""Owns the pass that takes weights out of a model, and what the compiled model says about itself: its signature.

Knows nothing of files. A public function `main` with weights becomes `kerneldecl_bind_main`, which takes them and returns a
closure that is called as `main` was. So the virtual machine holds them, and a call costs what it did.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from kerneldecl.relax.signature import BIND, SIGNATURE
from kerneldecl.relax.weights_file import Weight, can_hold

LEAST_BYTES = 1024
"""Smaller constants stay in the library: there are few bytes in them, and each weight has a line in the file's header."""


@dataclass(frozen=True)
class Weights:
    """What was taken out of a model."""

    named: dict[str, Weight]
    digest: str
    """SHA-256 of all names and contents; the library has it, too."""


@tvm.transform.module_pass(opt_level=0, name="DetachWeights")
class DetachWeights:
    """Makes arguments of a model's constants and describes the model in it; `export_model` writes them to a file beside the library.

    It stands behind all passes that fold, fuse or match: those may need the constants. `weights` are the last module's.
    """

    weights: Weights | None = None

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        functions = {var: func for var, func in mod.functions_items() if isinstance(func, relax.Function)}
        public = {var.name_hint: func for var, func in functions.items() if _is_public(func)}
        needed = _needed(functions)
        names = {key: f"w{at}" for at, key in enumerate(dict.fromkeys(key for keys in needed.values() for key in keys))}
        named = {names[key]: weight for keys in needed.values() for key, weight in keys.items()}
        self.weights = Weights(named, _digest(named))
        change = _Detach(mod, needed)
        for var in functions:
            change.rewrite(var)
        order = {name: [names[key] for key in needed[mod.get_global_var(name)]] for name in public}
        target = tvm.target.Target.current(allow_none=True)
        described = {
            "schema": 1,
            "device": "cuda" if target is not None and target.kind.name == "cuda" else "cpu",
            "functions": {name: _signature(func) for name, func in public.items()},
            "weights": {name: order[name] for name in public if order[name]},
            "weights_digest": self.weights.digest,
        }
        change.say(json.dumps(described))
        return change.result()


def _is_public(func: relax.Function) -> bool:
    return bool(func.attrs) and "global_symbol" in func.attrs


_Keys = dict[tuple[int, str, tuple[int, ...]], Weight]
"""Weights by address, dtype and shape: a tensor that several constants share is one weight."""


def _needed(functions: dict[Any, relax.Function]) -> dict[Any, _Keys]:
    """Return the weights that each function needs: its own constants, and those of the functions that it calls."""
    own = {var: dict(_constants(func)) for var, func in functions.items()}
    calls = {var: [callee for callee in _callees(func) if callee in functions] for var, func in functions.items()}
    found = {var: dict(keys) for var, keys in own.items()}
    while True:
        wider = {var: {**found[var], **{key: weight for callee in calls[var] for key, weight in found[callee].items()}} for var in found}
        if all(len(wider[var]) == len(found[var]) for var in found):
            return found
        found = wider


def _constants(func: relax.Function) -> Iterator[tuple[Any, Weight]]:
    found: list[tvm.ir.expr.GenericConst] = []

    def note(expr: Any) -> None:
        if isinstance(expr, tvm.ir.expr.GenericConst) and _key(expr) is not None:
            found.append(expr)

    relax.analysis.post_order_visit(func, note)
    for constant in found:
        key = _key(constant)
        assert key is not None, "the others were left out"
        address, dtype, shape = key
        yield key, Weight(dtype, shape, address, constant.value)


def _key(constant: tvm.ir.expr.GenericConst) -> tuple[int, str, tuple[int, ...]] | None:
    """Return what identifies a constant that is a weight; None for one that stays in the library."""
    dtype, shape = str(constant.value.dtype), tuple(map(int, constant.value.shape))
    if not can_hold(dtype):
        return None
    key = (int(constant.value.data_ptr()), dtype, shape)
    return key if Weight(dtype, shape, key[0], None).nbytes >= LEAST_BYTES else None


def _callees(func: relax.Function) -> list[Any]:
    found: list[Any] = []

    def note(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.GlobalVar):
            found.append(expr.op)

    relax.analysis.post_order_visit(func, note)
    return found


def _digest(named: dict[str, Weight]) -> str:
    content = hashlib.sha256()
    for name, weight in named.items():
        content.update(f"{name} {weight.dtype} {weight.shape}\n".encode())
        content.update(weight.content)
    return content.hexdigest()


@relax.expr_functor.mutator
class _Detach(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    """Replaces weights by parameters, and has every call of a function give it its weights."""

    def __init__(self, mod: tvm.IRModule, needed: dict[Any, _Keys]) -> None:
        super().__init__(mod)
        self._mod, self._needed = mod, needed
        self._params: dict[Any, relax.Var] = {}
        self._made: dict[Any, Any] = {}

    def rewrite(self, var: Any) -> None:
        """Make a function with parameters for its weights of one without, after those that it calls; one that needs none stays."""
        keys, func = self._needed[var], self._mod[var]
        if not keys or var in self._made:
            return
        for callee in _callees(func):
            if callee in self._needed:
                self.rewrite(callee)
        self._params = {key: relax.Var(f"w{at}", relax.TensorType(key[2], key[1])) for at, key in enumerate(keys)}
        attrs = {str(name): value for name, value in (func.attrs or {}).items() if str(name) != "global_symbol"}
        attrs.setdefault("num_input", len(func.params))  # the virtual machine checks so many arguments at each call
        params = [*func.params, *self._params.values()]
        made = relax.Function(params, self.visit_expr(func.body), func.ret_ty, is_pure=func.is_pure)
        for name, value in attrs.items():
            made = made.with_attr(name, value)
        self._made[var] = self.builder_.add_func(made, f"{var.name_hint}_with_weights")
        if _is_public(func):
            self._bind(var.name_hint, self._made[var], list(keys))

    def result(self) -> tvm.IRModule:
        """Return the module without the functions that others stand for."""
        mod = self.builder_.finalize()
        functions = {var: func for var, func in mod.functions_items() if var not in self._made}
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    def _bind(self, name: str, var: Any, keys: Sequence[Any]) -> None:
        given = [relax.Var(f"w{at}", relax.TensorType(key[2], key[1])) for at, key in enumerate(keys)]
        closure = relax.op.make_closure(var, relax.Tuple(given))
        result = relax.Var("closure", relax.ObjectType())
        body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(result, closure)])], result)
        func = relax.Function(given, body, relax.ObjectType()).with_attr("global_symbol", BIND + name)
        self.builder_.add_func(func, BIND + name)

    def say(self, text: str) -> None:
        """Add the function that returns a text."""
        func = relax.Function([], relax.SeqExpr([], tvm.ir.StringImm(text)), relax.ObjectType())
        self.builder_.add_func(func.with_attr("global_symbol", SIGNATURE), SIGNATURE)

    def visit_generic_const_(self, constant: tvm.ir.expr.GenericConst) -> relax.Expr:
        return self._params.get(_key(constant), constant)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        keys = self._needed.get(call.op) if isinstance(call.op, tvm.ir.GlobalVar) else None
        if not keys:
            return call
        return relax.Call(self._made[call.op], [*call.args, *(self._params[key] for key in keys)], call.attrs, call.ty_args)


def _signature(func: relax.Function) -> dict[str, Any]:
    """Return names, shapes and dtypes of a function's inputs and outputs; a dynamic extent stands as its name."""
    inputs = [{"name": param.name, **_described(param.ty)} for param in func.params]
    result = func.ret_ty
    outputs = [_described(each) for each in (result.fields if isinstance(result, relax.TupleType) else [result])]
    return {"inputs": inputs, "outputs": outputs}


def _described(type_: Any) -> dict[str, Any]:
    if not isinstance(type_, relax.TensorType) or type_.shape is None:
        return {"shape": None, "dtype": str(getattr(type_, "dtype", "")) or None}
    extents = [int(each) if isinstance(each, tvm.tirx.IntImm) else str(each) for each in type_.shape]
    return {"shape": extents, "dtype": str(type_.dtype)}
