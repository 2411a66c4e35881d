"""Owns what headers of every language say of their function: its name, where it is from, its figures and arguments.

Knows nothing of languages' types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_TAKEN = """
alignas auto bool break case catch char class const default delete do double else enum error explicit export extern false float for friend
goto if inline int long namespace new operator own private protected public register return short signed sizeof static stream struct switch
template this throw true try typedef typename union unsigned using virtual void volatile while workspace
"""
"""Words of C++, and names that the headers' functions use."""


class Argument(NamedTuple):
    """An argument of an exported function: a row-major array without gaps."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_output: bool
    is_updated: bool = False
    """Whether it is an output of which a part stays as the caller has it."""


@dataclass(frozen=True)
class Function:
    """An exported function."""

    name: str
    about: tuple[str, ...]
    """Lines of comment on where the kernel is from."""
    figures: Mapping[str, float]
    """Constants of the header, by name: the work of a call, and its recorded seconds."""
    arguments: tuple[Argument, ...]
    """Inputs, then outputs, as the rule has them."""

    def head(self, compiled: Sequence[str], call: str, notes: Sequence[str]) -> list[str]:
        """Return the comment at a header's top; `compiled` says how, `call` is the function up to its arguments."""
        arguments = ", ".join(each.name for each in self.arguments)
        lines = [*self.about, "", *compiled, "", f"{call}{arguments})", *shapes_of(self.arguments), *notes]
        return [f"// {line}".rstrip() for line in lines]

    def constants(self) -> list[str]:
        return [f"constexpr double {name} = {value!r};" for name, value in self.figures.items()]


def arguments_of(signature: Mapping[str, Any]) -> tuple[Argument, ...]:
    """Return the arguments of a signature (inputs and outputs, each with name, shape and dtype), by names that C++ allows."""
    updated = signature.get("updated", 0)
    outputs = [(each, True, place < updated) for place, each in enumerate(signature["outputs"])]
    listed = [*((each, False, False) for each in signature["inputs"]), *outputs]
    return tuple(Argument(_legal(each["name"]), tuple(each["shape"]), each["dtype"], *role) for each, *role in listed)


def _legal(name: str) -> str:
    return f"{name}_" if name in _TAKEN.split() else name


def shapes_of(arguments: Sequence[Argument]) -> list[str]:
    """Return a line for each argument: name, dtype and shape."""
    roles = {(True, False): ", written", (True, True): ", updated in place"}
    said = [(f"{each.dtype}[{', '.join(map(str, each.shape))}]", roles.get((each.is_output, each.is_updated), "")) for each in arguments]
    return [f"  {each.name}: {shape}{role}" for each, (shape, role) in zip(arguments, said, strict=True)]
