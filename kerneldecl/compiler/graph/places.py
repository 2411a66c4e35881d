"""Owns where a function stands in the user's model: its place, a dotted path such as encoder.layer.0.attention.qkv.

Knows nothing of what functions compute.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kerneldecl.model import frozen

PLACES = "kerneldecl.places"
"""Attribute of a PrimFunc: the places that call it, the first of which names it."""
RULE = "kerneldecl.rule"
"""Attribute of a PrimFunc: the standard rule that it was made of, and its attributes, as JSON."""
REFUSED = "kerneldecl.refused"
"""Attribute of a module: what looks like a larger rule and is none, each with its place and the reason."""
NOTED = "kerneldecl.noted"
"""Attribute of a module: rules of which another one is a faster form, each with its place and why it is not that."""
LONGEST = 60
"""Characters of a name."""
_UNNUMBERED = LONGEST - 4
_PARAMETER = re.compile(r"\.(weight|bias|gamma|beta|kernel|in_proj_weight|in_proj_bias)$")


def places_of(func: Any) -> list[str]:
    """Return the places that call a function, the one that names it first; none where no pass knows."""
    return [str(place) for place in (func.attrs or {}).get(PLACES, ())]


def refused_of(mod: Any) -> list[str]:
    """Return what looks like a larger rule in a module and stays several functions, each with its place and the reason."""
    return [str(each) for each in (mod.attrs or {}).get(REFUSED, ())]


def noted_of(mod: Any) -> list[str]:
    """Return which rules of a module have a faster form that does not fit, each with its place and the reason."""
    return [str(each) for each in (mod.attrs or {}).get(NOTED, ())]


def rule_of(func: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Return the standard rule that a function was made of, and its attributes; None for another function."""
    text = (func.attrs or {}).get(RULE)
    if text is None:
        return None
    found = json.loads(str(text))
    return found["rule"], {name: frozen(value) for name, value in found["attrs"].items()}


def place_of_weight(names: Iterable[str]) -> str:
    """Return the module that owns weights of these names in the model; empty where none tells.

    A name without a module, such as w, tells nothing. Exporters to ONNX keep the names of some weights only: onnx::MatMul_123 is none.
    """
    for name in names:
        if "." in name and "::" not in name:
            path = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._-")
            module = _PARAMETER.sub("", path)
            if module:
                return module
    return ""


def parent(place: str) -> str:
    return place.rpartition(".")[0]


def module_of(scope: str, work: str) -> str:
    """Return the place of a work that a module is called after: encoder.layer.0.attention for the scope encoder.layer.0.attention.self.

    A module is called so by the word's first four letters, anywhere in its name. Where none is, the work is a part of the scope.
    """
    parts = scope.split(".") if scope else []
    named = [at for at, part in enumerate(parts) if re.search(rf"{work[:4]}", part, re.IGNORECASE)]
    kept = parts[: named[-1] + 1] if named else parts
    return ".".join(kept if kept and kept[-1].lower() == work else [*kept, work])


def common(scopes: Iterable[str]) -> str:
    """Return the innermost module that holds all scopes; empty ones are not known and do not count."""
    known = [scope.split(".") for scope in scopes if scope]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*known, strict=False))
    return ".".join(parts[0] for parts in same)


def latest(scopes: Mapping[Any, str], variables: Iterable[Any]) -> str:
    """Return the module of the variable that was computed last, of those whose module is known; `scopes` are in order of computation.

    What adds a residual stands where its other operand was computed.
    """
    read = set(variables)
    return next((scope for var, scope in reversed(list(scopes.items())) if scope and var in read), "")


def joined(places: Sequence[str]) -> str:
    """Return the place of linears that became one: query, key and value of a module are its qkv, gate_proj and up_proj its gate_up_proj."""
    scope = common(map(parent, places))
    words = [place.removeprefix(f"{scope}.").replace(".", "_") for place in places]
    tail = next((f"_{end}" for end in ("proj", "linear", "lin", "layer") if all(word.endswith(f"_{end}") for word in words)), "")
    stems = [word.removesuffix(tail) for word in words]
    word = "".join(stem[0] for stem in stems) if [stem[:1] for stem in stems] == ["q", "k", "v"] else "_".join(stems)
    return f"{scope}.{word}{tail}".lstrip(".")


def shortened(name: str) -> str:
    """Return a name of at most LONGEST characters with a number behind: outer modules are left out, then words of the innermost."""
    while len(name) > _UNNUMBERED and "." in name:
        name = name.partition(".")[2]
    while len(name) > _UNNUMBERED and "_" in name:
        name = name.rpartition("_")[0]
    return name[:_UNNUMBERED]


def symbol(place: str) -> str:
    """Return a place as the name of a function: an identifier of C."""
    word = re.sub(r"\W+", "_", place, flags=re.ASCII)
    return f"f_{word}" if word[:1].isdigit() else word
