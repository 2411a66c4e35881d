"""Owns the names of a torch program's dynamic dimensions.

Knows nothing of operators, nor of the sizes that are declared for a dimension.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tvm


def named_dims(mod: tvm.IRModule, program: Any, dims: Sequence[str] = ()) -> tvm.IRModule:
    """Return the module with names for its dynamic dimensions that people know: those given to torch.export.Dim.

    A saved program has lost these: torch.export.save writes symbols such as s31 alone. There, the unknown names among `dims` are
    those of the nameless dimensions, in the order in which these stand in the inputs, if there are as many; else a dimension is
    named after the first place where it stands: x_0 is the first one of input x.
    """
    places = _places(mod["main"])
    names = {symbol: name for symbol, name in _names_of(program).items() if symbol in places}
    nameless = [symbol for symbol in places if symbol not in names]
    free = [dim for dim in dims if dim not in names.values() and dim not in (places[symbol] for symbol in nameless)]
    names |= dict(zip(nameless, free, strict=True)) if len(free) == len(nameless) else {symbol: places[symbol] for symbol in nameless}
    return _renamed(mod, names)


def _places(func: Any) -> dict[str, str]:
    """Return input and axis where each symbol first stands by itself, by the symbol's name."""
    found: dict[str, str] = {}
    for param in func.params:
        for axis, extent in enumerate(getattr(param.ty, "shape", None) or ()):
            if tvm.ir.is_prim_var(extent):
                found.setdefault(extent.name, re.sub(r"\W", "_", f"{param.name}_{axis}"))
    return found


def _names_of(program: Any) -> dict[str, str]:
    """Return the names of torch.export.Dim by symbol, as a program holds them that was not saved since its export."""
    from torch._guards import detect_fake_mode

    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode(values)
    env = mode and mode.shape_env
    names = getattr(env, "source_name_to_debug_name", {})
    found: dict[str, str] = {}
    for symbol, sources in getattr(env, "var_to_sources", {}).items():
        given = (names[source.name] for source in sources if source.name in names)
        found |= {str(symbol): name for name in given if re.fullmatch(r"[A-Za-z]\w*", name)}
    return found


def _renamed(mod: tvm.IRModule, names: dict[str, str]) -> tvm.IRModule:
    func = mod["main"]
    symbols = {extent for param in func.params for extent in getattr(param.ty, "shape", None) or () if tvm.ir.is_prim_var(extent)}
    replaced = {symbol: tvm.tirx.Var(names[symbol.name], "int64") for symbol in symbols if symbol.name in names}
    if not replaced:
        return mod
    bound = func.bind_symbolic_vars(replaced)
    for attribute in ("tir_var_lower_bound", "tir_var_upper_bound"):
        limits = (bound.attrs or {}).get(attribute)
        if limits is not None:
            bound = bound.with_attr(attribute, {names.get(str(symbol), str(symbol)): limit for symbol, limit in limits.items()})
    mod = mod.clone()
    mod["main"] = bound
    return mod
