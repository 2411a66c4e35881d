"""Owns what a lowered host function does: which buffers and tensor maps it creates, which kernels it launches on how many threads.

Knows nothing of what kernels do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm.sym import Analyzer
from tvm.tirx.build import codegen_build, split_host_device_mods

from kerneldecl.compiler.passes.dependent_launch import with_declared_pdl
from kerneldecl.compiler.passes.nan import gives_nan, with_nan_in_cuda
from kerneldecl.toolchain import nvcc


@dataclass(frozen=True)
class Lowered:
    """A PrimFunc's CUDA source and its host function as lines of C++."""

    source: str
    host: tuple[str, ...]
    arguments: int


def lower(func: Any, change: Callable[[Any], Any] = lambda device: device, arch: str = "sm_90a") -> Lowered:
    """Lower a PrimFunc, written in TIRx or scheduled from TensorIR, as tvm.compile does but for a change of device code."""
    func = func.with_attr("global_symbol", "main")
    attrs = func.attrs or {}
    pipeline = "s_tir" if bool(attrs.get("s_tir", False)) else "tirx"
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, host=tvm.target.Target("llvm"))
    lower_all, _, finalize_device = tvm.tirx.get_tir_pipeline(pipeline)
    before = os.environ.get("TVM_COMPILE_FORCE_FALLBACK")
    os.environ["TVM_COMPILE_FORCE_FALLBACK"] = "1"  # leave CUDA source as it is
    try:
        with target:
            bound = tvm.tirx.transform.BindTarget(target)(tvm.IRModule({"main": func}))
            host, devices = split_host_device_mods(lower_all(bound))
            [(device_target, device)] = devices.items()
            host, device = with_declared_pdl(host, device)
            library = codegen_build(finalize_device()(change(device)), device_target)  # LLVM would compile what is only read here
    finally:
        os.environ.pop("TVM_COMPILE_FORCE_FALLBACK")
        if before is not None:
            os.environ["TVM_COMPILE_FORCE_FALLBACK"] = before
    [main] = [function for function in host.functions.values() if bool((function.attrs or {}).get("tirx.is_entry_func", False))]
    source = str(library.inspect_source("cuda"))
    if any(map(gives_nan, device.functions.values())):
        source = with_nan_in_cuda(source, in_one=True)
    return Lowered(nvcc.with_vectors_of_eight(source), tuple(_Reader().read(main.body)), len(func.params))


def main_of(lowered: Lowered) -> str:
    """Return the C++ main function that loads the arguments, does what the host function does, and saves the arguments."""
    lines = [f'auto* argument_{n} = machine::argument("argument {n}");' for n in range(lowered.arguments)]
    body = "\n  ".join([*lines, *lowered.host, "machine::save();"])
    return f"int main(int, char** arguments) {{\n  machine::seed(atoi(arguments[1]));\n  {body}\n}}\n"


@dataclass
class _Reader:
    """What is known of the host function's variables: C++ expressions of pointers, maps and numbers."""

    values: dict[Any, str] = field(default_factory=dict)
    maps: int = 0

    def read(self, stmt: Any) -> Iterator[str]:
        kind = type(stmt).__name__
        if kind == "SeqStmt":
            for part in stmt.seq:
                yield from self.read(part)
        elif kind in {"Bind", "LetStmt"}:
            yield from self._bind(stmt.var, stmt.value)
        elif kind == "AllocBuffer":
            self.values[stmt.buffer] = f"workspace_{len(self.values)}"
            bytes_ = math.prod(int(extent) for extent in stmt.buffer.shape) * tvm.DataType(str(stmt.buffer.dtype)).itemsize
            yield f"auto* {self.values[stmt.buffer]} = machine::workspace({bytes_});"
        elif kind == "DeclBuffer":
            yield from self._bind(stmt.buffer, stmt.data)
        elif kind == "Evaluate":
            yield from self._evaluate(stmt.value)
        body = getattr(stmt, "body", None)
        if body is not None:
            yield from self.read(body)

    def _bind(self, variable: Any, value: Any) -> Iterator[str]:
        name = _operation(value)
        if name == "tirx.tvm_stack_alloca" and str(value.args[0].value) == "tensormap":
            self.maps += 1
            self.values[variable] = f"map_{self.maps}"
            return
        known = self._expression(value)
        if known.startswith("machine::workspace"):
            self.values[variable] = f"workspace_{len(self.values)}"
            yield f"auto* {self.values[variable]} = {known};"
        elif known:
            self.values[variable] = known

    def _evaluate(self, call: Any) -> Iterator[str]:
        name = _operation(call)
        if name == "tirx.tvm_call_packed" and str(call.args[0].value) == "runtime.cuTensorMapEncodeTiled":
            _, tensor, dtype, rank, base, *numbers = call.args
            listed = ", ".join(str(_number(number)) for number in numbers)
            yield f'CUtensorMap {self._known(tensor)} = machine::tiled("{dtype.value}", {int(rank)}, {self._known(base)}, {{{listed}}});'
        elif name == "tirx.call_ffi_kernel":
            tags = [str(tag) for tag in call.attrs.launch_params]
            kernel, *arguments = call.args
            split = len(arguments) - len([tag for tag in tags if tag not in _FLAGS])
            extents = dict(zip([tag for tag in tags if tag not in _FLAGS], (str(int(extent)) for extent in arguments[split:]), strict=True))
            yield _launch(str(kernel.value), [self._known(argument) for argument in arguments[:split]], extents, set(tags) & _FLAGS)

    def _known(self, value: Any) -> str:
        known = self._expression(value)
        assert known, f"the emulator does not know what {value} is on the host"

        return known

    def _expression(self, value: Any) -> str:
        """Return C++ for a value that kernels and maps are given, empty for what only checks arguments."""
        if isinstance(value, tvm.ir.Var):
            return self.values.get(value, "")
        if isinstance(value, tvm.tirx.IntImm):
            return str(int(value.value))
        known = ""
        match _operation(value), tuple(getattr(value, "args", ())):
            case "tirx.reinterpret" | "tirx.buffer_data" | "tirx.handle_add_byte_offset", [first, *_]:
                known = self._expression(first)
            case "prim.if_then_else", [_, _, otherwise]:  # an argument is a tensor, or a pointer to one
                known = self._expression(otherwise)
            case "tirx.tvm_struct_get", [_, number, field] if int(field) == _ARGUMENT:
                known = f"argument_{int(number)}"
            case "tirx.tvm_struct_get", [tensor, _, field] if int(field) == _DATA:
                known = self._expression(tensor)
            case "tirx.call_extern", [name, _, _, size, *_] if str(name.value) == "TVMBackendAllocWorkspace":
                known = f"machine::workspace({int(size)})"
        return known


def _number(value: Any) -> int:
    """Return an integer that TVM computes on the host."""
    return int(Analyzer().simplify(value))


# Of TVM's TVMStructFieldKind: a tensor's address, and what a packed function's argument holds.
_DATA, _ARGUMENT = 1, 15
_FLAGS = {"tirx.use_programtic_dependent_launch", "tirx.use_cooperative_launch"}


def _operation(value: Any) -> str:
    return str(value.op.name) if isinstance(value, tvm.ir.Call) and hasattr(value.op, "name") else ""


def _launch(kernel: str, arguments: list[str], extents: Mapping[str, str], flags: set[str]) -> str:
    def index3(prefix: str) -> str:
        return "{" + ", ".join(extents.get(f"{prefix}.{axis}", "1") for axis in "xyz") + "}"

    shared = extents.get("tirx.use_dyn_shared_memory", "0")
    has_pdl = "true" if "tirx.use_programtic_dependent_launch" in flags else "false"
    launch = f"{{{index3('blockIdx')}, {index3('clusterCtaIdx')}, {index3('threadIdx')}, {shared}, {has_pdl}}}"
    return f"machine::launch({launch}, [&] {{ machine::call({kernel}, {', '.join(arguments)}); }});"
