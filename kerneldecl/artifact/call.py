"""Owns a kernel as a program calls it: its signature, outputs that the call allocates, mistakes worded with the rule's names.

Knows nothing of artifacts' files, and imports neither NumPy's rivals nor a compiler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kerneldecl.arrays import ALIGNMENT_BYTES
from kerneldecl.artifact.kernels import needs_conversion, tensor
from kerneldecl.artifact.outputs import outputs_beside
from kerneldecl.diagnostics.signatures import signature_text, type_text
from kerneldecl.diagnostics.units import counted
from kerneldecl.model import Arg, Signature
from kerneldecl.serial import signature_from_json

_DEVICES = {"cpu": "the CPU", "cuda": "a CUDA GPU"}


class Kernel:
    """One kernel of an artifact, for arrays of NumPy, torch, CuPy, JAX or any other producer of DLPack.

    `kernel(*inputs)` returns new outputs of the inputs' library, `kernel(*inputs, *outputs)` writes the given ones and returns them: one
    array, or a tuple of several. Arrays are contiguous, of the shapes and dtypes of the signature, in the memory that the kernel runs on.
    Work on a GPU is queued on torch's current stream, or on the default stream where no argument is torch's. TypeError or ValueError
    says in one sentence which argument does not fit.
    """

    __slots__ = ("__name__", "_converts", "_function", "_inputs", "_wanted", "attrs", "device", "rule", "signature")

    def __init__(self, entry: Mapping[str, Any], function: Callable[..., object], device: str) -> None:
        self.__name__: str = entry["name"]
        self.rule: str = entry["rule"]
        self.attrs: Mapping[str, Any] = entry["attrs"]
        self.signature: Signature = signature_from_json(entry)
        self.device = device
        self._function = function
        self._inputs = len(self.signature.inputs)
        self._wanted = len(self.signature.args)
        self._converts = any(needs_conversion(arg.dtype) for arg in self.signature.args)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named:
            expected = signature_text(self.__name__, self.signature)
            raise TypeError(f"{', '.join(named)} is given by name, and a kernel takes arrays by position; expected {expected}")
        if len(args) == self._inputs != self._wanted:
            if not args:
                raise TypeError(f"{self!r} has no inputs that say where its outputs shall lie: pass them")
            if not hasattr(args[0], "__dlpack__"):
                raise TypeError(misfit(self, (*args, *[None] * (self._wanted - self._inputs))))
            args += outputs_beside(args[0], self.signature.outputs)
        try:
            # tvm_ffi takes arrays as they are, which costs a third of making tensors of them here, and follows torch's stream.
            self._function(*(map(tensor, args) if self._converts else args))
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            # The kernel has checked already; what it says, in mangled names, is looked at only where it objects.
            if problem := misfit(self, args):
                raise (TypeError if isinstance(error, TypeError) else ValueError)(problem) from None
            raise
        return args[-1] if self._wanted - self._inputs == 1 else args[self._inputs :]

    @property
    def __signature__(self) -> inspect.Signature:
        """The arguments by name, outputs last, each of which may be left out with all the others."""
        kind = inspect.Parameter.POSITIONAL_ONLY
        names = [name if name.isidentifier() else f"arg{at}" for at, name in enumerate(arg.name for arg in self.signature.args)]
        notes = [type_text(arg) for arg in self.signature.args]
        defaults = [inspect.Parameter.empty] * self._inputs + [None] * (self._wanted - self._inputs)
        listed = zip(names, defaults, notes, strict=True)
        return inspect.Signature([inspect.Parameter(name, kind, default=default, annotation=note) for name, default, note in listed])

    def __repr__(self) -> str:
        layout = f", layout {self.attrs['layout']}" if isinstance(self.attrs.get("layout"), str) else ""
        return f"<{self.rule} {signature_text(self.__name__, self.signature)}{layout}, on {_DEVICES.get(self.device, self.device)}>"


def misfit(kernel: Kernel, args: Sequence[Any]) -> str:
    """Return why arguments do not fit a kernel, as one sentence; empty where nothing is found."""
    signature, expected = kernel.signature, f"expected {signature_text(kernel.__name__, kernel.signature)}"
    if len(args) != len(signature.args):
        inputs, outputs = len(signature.inputs), len(signature.outputs)
        return f"{counted(len(args), 'array')} given; {expected}: pass {inputs}, or {inputs + outputs} with the outputs to write"
    found = (_wrong(arg, value, kernel.device) for arg, value in zip(signature.args, args, strict=True))
    return next((f"{problem}; {expected}" for problem in found if problem), "")


def _wrong(arg: Arg, value: Any, device: str) -> str:
    """Return what is wrong with one argument's value, as a phrase; empty where nothing is found."""
    if not hasattr(value, "__dlpack__"):
        return f"{arg.name} is of type {type(value).__name__}, which is no array (with __dlpack__)"
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        return f"{arg.name} is read-only, and NumPy shares no such memory through DLPack: pass a copy"
    try:
        given = tensor(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        return f"{arg.name} cannot be shared by DLPack ({str(error).splitlines()[0]})"
    return _wrong_tensor(arg, given, device)


def _wrong_tensor(arg: Arg, given: Any, device: str) -> str:
    got = Arg(arg.name, tuple(given.shape), str(given.dtype))
    if got != arg:
        return f"{arg.name} is {type_text(got)}"
    if not given.is_contiguous():
        return f"{arg.name} is not contiguous (strides {', '.join(map(str, given.strides))}): pass a contiguous copy"
    if given.device.type != device:
        return f"{arg.name} lies in memory of {given.device.type}, and the kernel runs on {_DEVICES.get(device, device)}"
    if device != "cpu" and given.data_ptr() % ALIGNMENT_BYTES:
        return f"{arg.name} starts at an address that {ALIGNMENT_BYTES} does not divide: pass a copy"
    return ""
