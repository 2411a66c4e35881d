"""Owns the reading of a CUDA function's host code: its workspaces, TMA descriptors and kernel launches, in order, as values.

Knows nothing of device code, or of the language that the calls are written in.

TVM's host function checks its arguments, then allocates what kernels share in global memory, encodes TMA descriptors and
launches kernels. Anything else there is an error: what cannot be repeated without TVM is not exported.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm

from kerneldecl.model import dtype_bytes

_ENCODE = "runtime.cuTensorMapEncodeTiled"
_DYNAMIC_SMEM = "tirx.use_dyn_shared_memory"
_FLAGS = {"tirx.use_programtic_dependent_launch": "is_pdl", "tirx.use_cooperative_launch": "is_cooperative"}
"""Launch parameters without a value, in TVM's spelling."""


@dataclass(frozen=True)
class Workspace:
    """A buffer in global memory that kernels of one call share."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor: the arguments of cuTensorMapEncodeTiled, innermost dimension first."""

    name: str
    dtype: str
    address: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    """Of all dimensions but the innermost."""
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    modes: tuple[int, int, int, int]
    """Interleave, swizzle, L2 promotion, fill of what is out of bounds, as the driver's enumerations number them."""


@dataclass(frozen=True)
class KernelCall:
    """A launch of a kernel with its arguments: names of parameters, workspaces and descriptors."""

    kernel: str
    arguments: tuple[str, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem_bytes: int
    is_pdl: bool = False
    is_cooperative: bool = False


HostCall = TensorMap | KernelCall


@dataclass(frozen=True)
class HostCalls:
    """What the host does in one call of the function."""

    workspaces: tuple[Workspace, ...]
    calls: tuple[HostCall, ...]


def host_calls(body: Any, parameters: Sequence[str]) -> HostCalls:
    """Return what a host function does, by the names of its parameters in their order; raise ValueError at anything else than is known."""
    reader = _Reader(parameters)
    calls = tuple(reader.read(body))
    return HostCalls(tuple(reader.workspaces), calls)


class _Reader:
    """Reads statements in order and remembers what the variables of the host code stand for."""

    def __init__(self, parameters: Sequence[str]) -> None:
        self._parameters = parameters
        self._names: dict[Any, str] = {}
        """Of buffers and descriptors, by their variables."""
        self._positions: dict[Any, int] = {}
        """Of parameters, by the variables that hold their DLTensor."""
        self.workspaces: list[Workspace] = []

    def read(self, stmt: Any) -> Iterator[HostCall]:
        if isinstance(stmt, tvm.tirx.SeqStmt | tvm.tirx.AttrStmt):
            for part in stmt.seq if isinstance(stmt, tvm.tirx.SeqStmt) else [stmt.body]:
                yield from self.read(part)
        elif isinstance(stmt, tvm.tirx.Evaluate) and isinstance(stmt.value, tvm.ir.Call):
            yield from self._call(stmt.value)
        else:
            self._note(stmt)

    def _note(self, stmt: Any) -> None:
        """Remember what a statement declares; raise ValueError at one that does anything else."""
        if isinstance(stmt, tvm.tirx.Bind):
            self._bind(stmt.var, stmt.value)
        elif isinstance(stmt, tvm.tirx.DeclBuffer):
            self._names[stmt.buffer] = self._address(stmt.data)
        elif isinstance(stmt, tvm.tirx.AllocBuffer):
            self._allocate(stmt.buffer)
        elif not isinstance(stmt, tvm.tirx.Return) and not _only_asserts(stmt):
            raise ValueError(f"the host code has a {type(stmt).__name__}, which cannot be exported")

    def _bind(self, var: Any, value: Any) -> None:
        if isinstance(value, tvm.ir.Call) and value.op.name == "tirx.tvm_stack_alloca":
            self._names[var] = _legal(var.name)
        elif (position := _position(value)) is not None:
            self._positions[var] = position

    def _allocate(self, buffer: Any) -> None:
        name = _legal(buffer.name) + f"_workspace{len(self.workspaces) or ''}"
        dtype, _, lanes = str(buffer.dtype).partition("x")
        size = math.prod(int(extent) for extent in buffer.shape) * dtype_bytes(dtype) * int(lanes or 1)
        self.workspaces.append(Workspace(name, size))
        self._names[buffer] = name

    def _address(self, value: Any) -> str:
        """Return the name of what an expression points to."""
        if isinstance(value, tvm.ir.Call) and value.op.name == "tirx.tvm_struct_get" and value.args[0] in self._positions:
            return self._parameters[self._positions[value.args[0]]]
        if isinstance(value, tvm.ir.Call) and value.op.name in {"tirx.reinterpret", "tirx.buffer_data"}:
            return self._address(value.args[0])
        if value in self._names:
            return self._names[value]
        raise ValueError(f"an argument of a kernel, {str(value)[:80]}, cannot be exported")

    def _call(self, call: Any) -> Iterator[HostCall]:
        if call.op.name == "tirx.call_ffi_kernel":
            yield self._kernel(call)
        elif call.op.name == "tirx.tvm_call_packed" and call.args[0].value == _ENCODE:
            yield self._tensor_map(list(call.args[1:]))
        elif call.op.name != "tirx.tvm_call_packed" or call.args[0].value != "__tvm_set_device":
            raise ValueError(f"the host code calls {call.op.name}, which cannot be exported")

    def _kernel(self, call: Any) -> KernelCall:
        params = [str(name) for name in call.attrs.launch_params]
        valued = [name for name in params if "Idx." in name or name == _DYNAMIC_SMEM]
        if unknown := set(params) - set(valued) - _FLAGS.keys():
            raise ValueError(f"a launch with {', '.join(sorted(unknown))} cannot be exported")
        arguments = call.args[1 : len(call.args) - len(valued)]
        extents = dict(zip(valued, map(int, call.args[-len(valued) :]), strict=True))
        return KernelCall(
            kernel=str(call.args[0].value),
            arguments=tuple(map(self._address, arguments)),
            grid=_dims("block", extents),
            block=_dims("thread", extents),
            cluster=_dims("clusterCta", extents),
            dynamic_smem_bytes=extents.get(_DYNAMIC_SMEM, 0),
            **{field: name in params for name, field in _FLAGS.items()},
        )

    def _tensor_map(self, args: Sequence[Any]) -> TensorMap:
        """Return the descriptor of TVM's call: variable, dtype, rank, address, then the driver's arguments, flattened."""
        name, dtype, rank, address = self._address(args[0]), str(args[1].value), int(args[2]), self._address(args[3])
        numbers = [int(number) for number in args[4:]]
        if len(numbers) != 4 * rank + 3:
            raise ValueError(f"{len(numbers)} arguments of a TMA descriptor of {rank} dimensions")
        shape, strides, box, element_strides = (
            tuple(numbers[begin:end]) for begin, end in itertools.pairwise([0, rank, 2 * rank - 1, 3 * rank - 1, 4 * rank - 1])
        )
        interleave, swizzle, promotion, fill = numbers[-4:]
        return TensorMap(name, dtype, address, shape, strides, box, element_strides, (interleave, swizzle, promotion, fill))


def _legal(name: str) -> str:
    """Return a name of TVM's in letters that C++ allows."""
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def _dims(name: str, extents: Mapping[str, int]) -> tuple[int, int, int]:
    x, y, z = (extents.get(f"{name}Idx.{axis}", 1) for axis in "xyz")
    return x, y, z


def _position(value: Any) -> int | None:
    """Return which of the function's arguments an expression reads; None where it reads none."""
    if not isinstance(value, tvm.ir.Call):
        return None
    if value.op.name == "tirx.tvm_struct_get" and value.args[0].name == "args":
        return int(value.args[1])
    found = (_position(arg) for arg in value.args)
    return next((position for position in found if position is not None), None)


def _only_asserts(stmt: Any) -> bool:
    """Say whether a conditional statement holds checks of arguments and nothing else."""
    if isinstance(stmt, tvm.tirx.SeqStmt):
        return all(map(_only_asserts, stmt.seq))
    if isinstance(stmt, tvm.tirx.IfThenElse):
        return _only_asserts(stmt.then_case) and (stmt.else_case is None or _only_asserts(stmt.else_case))
    return isinstance(stmt, tvm.tirx.AssertStmt)
