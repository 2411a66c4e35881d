"""Owns kernels as operators of torch, which torch.compile and torch.export keep.

Knows nothing of models: an operator is one kernel, or those that one declaration was expanded to. Imports torch, so it is imported when
it is asked for.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kerneldecl.artifact.call import Kernel
from kerneldecl.artifact.dispatch import Dispatch

if TYPE_CHECKING:
    from kerneldecl.artifact.load import Artifact

_KEPT: dict[str, torch.library.Library] = {}
"""Libraries by namespace: torch forgets the operators of one that is not kept."""
_DISPATCH_KEYS: Mapping[str, str] = {"cpu": "CPU", "cuda": "CUDA"}


def register(artifact: Artifact, namespace: str) -> Any:
    """Register the kernels of an artifact as `torch.ops.<namespace>.<entry>`, and return the namespace.

    Registered again under a namespace, the operators of before are replaced. An operator takes contiguous tensors and returns new ones;
    what a kernel updates in place is an argument that the operator mutates, as its schema says.
    It has no gradient. Raise ValueError for a namespace that is no identifier, or names of entries that become one operator's.
    """
    if not namespace.isidentifier():
        raise ValueError(f"{namespace!r} cannot be a namespace of torch's operators: choose an identifier")
    operators = _operators(artifact)
    if old := _KEPT.pop(namespace, None):
        old._destroy()  # noqa: SLF001  torch has no public way to replace operators
    library = _KEPT[namespace] = torch.library.Library(namespace, "DEF")
    key = _DISPATCH_KEYS[artifact.manifest["arch"]["kind"]]
    for name, function in operators.items():
        kernels = function.kernels if isinstance(function, Dispatch) else (function,)
        library.define(f"{name}{_schema(kernels[0])}", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _Contiguous(function), key)
        torch.library.register_fake(f"{namespace}::{name}", _Fake(function), lib=library)
    return getattr(torch.ops, namespace)


def _operators(artifact: Artifact) -> dict[str, Kernel | Dispatch]:
    """Return what is to be registered, by the operator's name."""
    found: dict[str, Kernel | Dispatch] = {}
    for entry, kernel in artifact.items():
        name = operator_name(entry)
        if name in found:
            raise ValueError(f"entries {found[name].__name__} and {entry} would both be the operator {name}: rename one")
        found[name] = kernel
    for base in sorted({entry.partition("[")[0] for entry in artifact if "[" in entry}):
        dispatch = artifact.dispatch(base)
        if len({_schema(kernel) for kernel in dispatch.kernels}) == 1:
            found.setdefault(operator_name(base), dispatch)
    return found


def operator_name(entry: str) -> str:
    """Return the operator's name of an entry: `proj[m=8,n=64]` becomes `proj_m_8_n_64`, and what no identifier has an underscore."""
    name = re.sub(r"\W+", "_", entry, flags=re.ASCII).strip("_")
    return name if name.isidentifier() else f"_{name}"


def _schema(kernel: Kernel) -> str:
    inputs, made = len(kernel.signature.inputs), len(kernel.signature.made)
    types = ["Tensor"] * inputs + [f"Tensor({letter}!)" for letter in string.ascii_lowercase[: kernel.signature.updated]]
    arguments = ", ".join(f"{kind} {name}" for kind, name in zip(types, _argument_names(kernel), strict=True))
    returns = ", ".join(["Tensor"] * made)
    return f"({arguments}) -> {returns if made == 1 else f'({returns})'}"


def _argument_names(kernel: Kernel) -> Sequence[str]:
    names = [arg.name if arg.name.isidentifier() else f"arg{at}" for at, arg in enumerate(kernel.signature.given)]
    return names if len({*names}) == len(names) else [f"arg{at}" for at in range(len(names))]


class _Contiguous:
    """A kernel on tensors of any strides: torch.compile may give an operator views."""

    def __init__(self, function: Kernel | Dispatch) -> None:
        self._function = function
        kernel = function.kernels[0] if isinstance(function, Dispatch) else function
        self._inputs = len(kernel.signature.inputs)

    def __call__(self, *args: torch.Tensor) -> Any:
        whole = [arg.contiguous() for arg in args]
        made = self._function(*whole)
        for arg, copy in zip(args[self._inputs :], whole[self._inputs :], strict=True):
            if copy is not arg:
                arg.copy_(copy)  # it was updated
        return made


class _Fake:
    """What torch.compile asks in place of a kernel: empty tensors of the outputs' shapes, or the same sentence about wrong inputs."""

    def __init__(self, function: Kernel | Dispatch) -> None:
        self._function = function

    def __call__(self, *args: torch.Tensor) -> Any:
        function = self._function
        # Sizes that torch holds open become those of this call: a kernel has one shape.
        fixed = [arg.new_empty(tuple(map(int, arg.shape)), device="meta") for arg in args] if isinstance(function, Dispatch) else []
        kernel = function.chosen(*fixed) if isinstance(function, Dispatch) else function
        if kernel is None:
            raise ValueError(f"no kernel of {function.__name__} takes tensors of shapes {[list(arg.shape) for arg in args]}")
        for arg, given in zip(kernel.signature.given, args, strict=True):
            if (tuple(given.shape), given.dtype) != (arg.shape, getattr(torch, arg.dtype)):
                raise ValueError(f"{arg.name} is {str(given.dtype).removeprefix('torch.')}{list(given.shape)}; expected {kernel!r}")
        made = tuple(args[0].new_empty(output.shape, dtype=getattr(torch, output.dtype)) for output in kernel.signature.made)
        return made[0] if len(made) == 1 else made or None
