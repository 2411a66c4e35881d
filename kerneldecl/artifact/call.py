"""Owns a kernel as a program calls it: its signature, outputs that the call allocates, mistakes worded with the rule's names.

Knows nothing of artifacts' files, and imports neither NumPy's rivals nor a compiler.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kerneldecl.arrays import ALIGNMENT_BYTES
from kerneldecl.artifact.kernels import needs_conversion, tensor
from kerneldecl.artifact.outputs import outputs_beside
from kerneldecl.diagnostics.signatures import signature_text, type_text
from kerneldecl.diagnostics.units import counted
from kerneldecl.model import dtype_bytes
from kerneldecl.serial import signature_from_json
from kerneldecl.signature import Arg, Signature

_DEVICES = {"cpu": "the CPU", "cuda": "a CUDA GPU"}


class Kernel:
    """One kernel of an artifact, for arrays of NumPy, torch, CuPy, JAX or any other producer of DLPack.

    `kernel(*inputs)` returns new outputs of the inputs' library, `kernel(*inputs, *outputs)` writes the given ones and returns them: one
    array, or a tuple of several. What a kernel updates in place is given behind the inputs, always, and not returned: a kernel that does
    nothing else returns None. Arrays are contiguous, of the shapes and dtypes of the signature, in the memory that the kernel runs on, and
    what is written shares no memory with another argument: the first call with outputs looks at that, and later ones at the last argument.
    Work on a GPU is queued on torch's current stream, or on the default stream where no argument is torch's. TypeError or ValueError
    says in one sentence which argument does not fit.
    """

    __slots__ = ("__name__", "_converts", "_function", "_given", "_is_unchecked", "_wanted", "attrs", "device", "rule", "signature")

    def __init__(self, entry: Mapping[str, Any], function: Callable[..., object], device: str) -> None:
        self.__name__: str = entry["name"]
        self.rule: str = entry["rule"]
        self.attrs: Mapping[str, Any] = entry["attrs"]
        self.signature: Signature = signature_from_json(entry)
        self.device = device
        self._function = function
        self._given = len(self.signature.given)
        self._wanted = len(self.signature.args)
        self._is_unchecked = True
        self._converts = any(needs_conversion(arg.dtype) for arg in self.signature.args)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named:
            expected = signature_text(self.__name__, self.signature)
            raise TypeError(f"{', '.join(named)} is given by name, and a kernel takes arrays by position; expected {expected}")
        if len(args) == self._given != self._wanted:
            args += self._outputs(args)
        elif len(args) == self._wanted and (self._is_unchecked or args[-1] is args[0] or args[-1] is args[-2]):
            self._check_memory(args)
        try:
            # tvm_ffi takes arrays as they are, which costs a third of making tensors of them here, and follows torch's stream.
            self._function(*(map(tensor, args) if self._converts else args))
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            # The kernel has checked already; what it says, in mangled names, is looked at only where it objects.
            if problem := misfit(self, args):
                raise (TypeError if isinstance(error, TypeError) else ValueError)(problem) from None
            raise
        made = self._wanted - self._given
        return args[-1] if made == 1 else args[self._given :] or None

    def _outputs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return new outputs for a call with these arguments; raise TypeError where nothing says where they shall lie."""
        if not args:
            raise TypeError(f"{self!r} has no inputs that say where its outputs shall lie: pass them")
        if not hasattr(args[0], "__dlpack__"):
            raise TypeError(misfit(self, (*args, *[None] * (self._wanted - self._given))))
        return outputs_beside(args[0], self.signature_of(args).made)

    def _check_memory(self, args: Sequence[Any]) -> None:
        """Raise ValueError where an argument that is written shares memory with another one."""
        if problem := shared_memory(self, args):
            raise ValueError(problem)
        self._is_unchecked = False

    def signature_of(self, args: Sequence[Any]) -> Signature:  # noqa: ARG002  of any number of rows it depends on them
        """Return the signature of a call with these arguments."""
        return self.signature

    @property
    def __signature__(self) -> inspect.Signature:
        """The arguments by name, outputs last, each of which may be left out with all the others."""
        kind = inspect.Parameter.POSITIONAL_ONLY
        names = [name if name.isidentifier() else f"arg{at}" for at, name in enumerate(arg.name for arg in self.signature.args)]
        notes = [type_text(arg) for arg in self.signature.args]
        defaults = [inspect.Parameter.empty] * self._given + [None] * (self._wanted - self._given)
        listed = zip(names, defaults, notes, strict=True)
        return inspect.Signature([inspect.Parameter(name, kind, default=default, annotation=note) for name, default, note in listed])

    def __repr__(self) -> str:
        layout = f", layout {self.attrs['layout']}" if isinstance(self.attrs.get("layout"), str) else ""
        return f"<{self.rule} {signature_text(self.__name__, self.signature)}{layout}, on {_DEVICES.get(self.device, self.device)}>"


class AnyRowsKernel(Kernel):
    """One kernel of an artifact that takes any number of rows up to a bound. Its signature is that of the largest number that was tuned."""

    __slots__ = ("_varying", "upto")

    def __init__(self, family: Mapping[str, Any], function: Callable[..., object], device: str) -> None:
        super().__init__(family, function, device)
        self.upto: int = family["upto"]
        self._varying: list[tuple[int, int]] = [(arg, dim) for arg, dim in family["varying"]]

    def signature_at(self, rows: int) -> Signature:
        """Return the signature of a call with so many rows."""
        args = [list(arg.shape) for arg in self.signature.args]
        for arg, dim in self._varying:
            args[arg][dim] = rows
        found = [Arg(arg.name, tuple(shape), arg.dtype) for arg, shape in zip(self.signature.args, args, strict=True)]
        inputs = len(self.signature.inputs)
        return Signature(tuple(found[:inputs]), tuple(found[inputs:]), self.signature.updated)

    def signature_of(self, args: Sequence[Any]) -> Signature:
        """Return the signature of a call with these arguments; raise ValueError where they have too many rows, or none."""
        arg, dim = self._varying[0]
        shape = getattr(args[arg], "shape", ()) if len(args) > arg else ()
        if len(shape) <= dim:
            return self.signature
        if not 1 <= shape[dim] <= self.upto:
            raise ValueError(f"{self.signature.args[arg].name} has {shape[dim]} rows; {self.__name__} takes 1 to {self.upto}")
        return self.signature_at(int(shape[dim]))

    def __repr__(self) -> str:
        shown = signature_text(self.__name__, self.signature)
        return f"<{self.rule} {shown}, and any other number of rows up to {self.upto}, on {_DEVICES.get(self.device, self.device)}>"


def misfit(kernel: Kernel, args: Sequence[Any]) -> str:
    """Return why arguments do not fit a kernel, as one sentence; empty where nothing is found."""
    signature = kernel.signature_of(args)
    expected = f"expected {signature_text(kernel.__name__, signature)}"
    if len(args) != len(signature.args):
        given, made = len(signature.given), len(signature.made)
        several = f", or {given + made} with the outputs to write" if made else ""
        return f"{counted(len(args), 'array')} given; {expected}: pass {given}{several}"
    found = (_wrong(arg, value, kernel.device) for arg, value in zip(signature.args, args, strict=True))
    return next((f"{problem}; {expected}" for problem in found if problem), "")


def shared_memory(kernel: Kernel, args: Sequence[Any]) -> str:
    """Return which argument that a kernel writes shares memory with another one, as one sentence; empty where none does."""
    try:
        places = [_place(tensor(value)) for value in args]
    except (TypeError, ValueError, BufferError, RuntimeError):
        return ""  # the kernel objects to it in other words
    names = [arg.name for arg in kernel.signature.args]
    for written in range(len(kernel.signature.inputs), len(places)):
        device, begin, end = places[written]
        for other, (its_device, its_begin, its_end) in enumerate(places[:written]):
            if device == its_device and max(begin, its_begin) < min(end, its_end):
                same = f"{names[written]} shares memory with {names[other]}"
                return f"{same}, which {kernel.__name__} uses while it writes: pass an array of its own"
    return ""


def _place(given: Any) -> tuple[str, int, int]:
    """Return the device of a tensor, and where its memory begins and ends."""
    begin = int(given.data_ptr())
    return str(given.device), begin, begin + math.prod(given.shape) * dtype_bytes(str(given.dtype))


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
    try:
        return _wrong_tensor(arg, given, device)
    except ValueError:  # tvm-ffi names no complex dtype
        return f"{arg.name} has a dtype that no kernel takes ({getattr(value, 'dtype', 'unknown')})"


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
