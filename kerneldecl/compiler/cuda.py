"""Owns the compilation of a scheduled module for an NVIDIA GPU: host code by LLVM, device code by nvcc, in one object.

Knows nothing of candidates, measurements or drivers; it needs neither a GPU nor its driver.

A function in S-TIR goes through TVM's pipeline for S-TIR and the passes of `kerneldecl.compiler.passes`; a function in TIRx, which
is written per thread, goes through TVM's own pipeline alone, for the arch with wgmma where the GPU has one.

TVM compiles device code itself, by a callback, where it finds CUDA's runtime and driver; otherwise it leaves source in the
module, to be compiled where the module is loaded. Here it always leaves source (TVM_COMPILE_FORCE_FALLBACK), so that builds with
and without a GPU are the same: nvcc compiles the source, and the cubin replaces it in the serialised module. The linked library
needs nothing but TVM's runtime (libtvm_runtime.so, libtvm_runtime_cuda.so) and a driver.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm.tirx.build import split_host_device_mods, tir_to_runtime
from tvm_ffi import structural

from kerneldecl.compiler.cpu import PASS_CONFIG, target_of
from kerneldecl.compiler.cuda_headers import headers_for
from kerneldecl.compiler.passes.aligned_vectors import aligned_vectors
from kerneldecl.compiler.passes.dependent_launch import pdl_kernels, pdl_launches, supports_pdl, with_declared_pdl
from kerneldecl.compiler.passes.float8_bits import float8_by_bits
from kerneldecl.compiler.passes.nan import carried, gives_nan, has_instruction, with_nan_in_cuda
from kerneldecl.compiler.passes.registers import lane_arrays, narrowed, unrolled
from kerneldecl.compiler.passes.single_barrier import one_barrier
from kerneldecl.compiler.passes.smem_attribute import static_smem_bytes, with_smem_attribute
from kerneldecl.compiler.passes.spread_copies import spread_copies
from kerneldecl.compiler.prim_funcs import is_tirx
from kerneldecl.compiler.rows import arguments_of
from kerneldecl.model import Arch, dtype_bytes
from kerneldecl.store.keys import FLOAT8_INSTRUCTIONS, digest, key, manifest
from kerneldecl.store.local import Record
from kerneldecl.store.protocol import BlobStore
from kerneldecl.toolchain import nvcc
from kerneldecl.toolchain.companions import VENDOR_CALLS
from kerneldecl.toolchain.cuda_objects import embed, sized
from kerneldecl.toolchain.nvcc import Cubin, Usage
from kerneldecl.toolchain.scalarize_arrays import scalarized

_DYNAMIC_SMEM = "tirx.use_dyn_shared_memory"
_TENSOR_MAP = "runtime.cuTensorMapEncodeTiled"
_BY_NAME = ("tirx.tvm_call_packed", "tirx.call_extern")

Extent = int | str
"""A number, or as text what it is computed from where that is known when the function is called."""
Call = tuple[str, Mapping[str, Extent]]
"""A launch: the kernel's name, and the extent of each launch parameter."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: grid, block and cluster dimensions, and the resources of a block."""

    kernel: str
    grid: tuple[Extent, Extent, Extent]
    block: tuple[Extent, Extent, Extent]
    dynamic_smem_bytes: int
    """Dynamic shared memory per block; `usage.smem_bytes` is added to it."""
    cluster: tuple[Extent, Extent, Extent]
    """Blocks per cluster in each dimension."""
    usage: Usage


@dataclass(frozen=True)
class CudaObject:
    """A relocatable object that exports one function, for `cuda_objects.link_cuda_library`."""

    content: bytes = field(repr=False)
    code: str
    """Digest of the device code, its launches and the function's signature: what a measurement depends on."""
    launches: tuple[Launch, ...]
    """Launches in order of execution."""


@dataclass(frozen=True)
class CudaProgram:
    """The CUDA source of a function as nvcc gets it, and how its kernels are launched."""

    source: str = field(repr=False)
    arch: str
    """The arch that the source is for, such as sm_90a."""
    flags: tuple[str, ...]
    """nvcc's flags, without the arch."""
    host: Any = field(repr=False)
    """Body of the host function that launches the kernels, as TIR."""


def compile_cuda_object(mod: tvm.IRModule, arch: Arch, symbol: str, store: BlobStore) -> CudaObject:
    """Return the object that holds the scheduled `main` as an exported function named `symbol`.

    The cubin of a source that was compiled before is taken from the store. Raise ValueError if something is bound to no threads or
    nvcc rejects the source, ToolchainError if there is no compiler for the arch.
    """
    func = mod["main"].with_attr("global_symbol", symbol)
    generated = _generated(func, symbol, arch)
    if not generated.arch:
        return CudaObject(_host_object(generated.library), _code_digest((), (), func, generated), ())
    functions, source = _serialized(generated, arch)
    cubin = _cubin(source if is_tirx(func) else scalarized(source), generated.arch, _flags(func), store)
    launches = tuple(_launch(kernel, extents, cubin.usage[kernel]) for kernel, extents in generated.calls)
    module = sized(b"cubin") + functions + sized(cubin.content)
    content = embed(_host_object(generated.library), module)
    return CudaObject(content, _code_digest((digest(cubin.content),), launches, func, generated), launches)


def cuda_source(mod: tvm.IRModule, arch: Arch, symbol: str) -> str:
    """Return the CUDA source of the scheduled `main`, before `compile_cuda_object` scalarizes its arrays; raise ValueError as that does."""
    return _serialized(_generated(mod["main"].with_attr("global_symbol", symbol), symbol, arch), arch)[1]


def cuda_program(mod: tvm.IRModule, arch: Arch, symbol: str) -> CudaProgram:
    """Return what `compile_cuda_object` compiles, before nvcc gets it; raise ValueError as that does."""
    func = mod["main"].with_attr("global_symbol", symbol)
    generated = _generated(func, symbol, arch)
    source = _serialized(generated, arch)[1]
    [host] = generated.hosts
    return CudaProgram(nvcc.prepared(source if is_tirx(func) else scalarized(source)), generated.arch, _flags(func), host)


def reworked(device: tvm.IRModule) -> tvm.IRModule:
    """Return device functions of S-TIR after our passes: single barriers, spread copies, unrolled loops and per-lane fragments."""
    return lane_arrays(unrolled(spread_copies(one_barrier(device))))


@contextmanager
def _source_only() -> Iterator[None]:
    """Have TVM's code generator emit CUDA source, also where it could compile it."""
    name = "TVM_COMPILE_FORCE_FALLBACK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_FLOAT8_HEADER = (
    "#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 890)\n#include <cuda_fp8.h>",
    "#if 1  // The header converts float8 where no instruction does.\n#include <cuda_fp8.h>",
)
"""What TVM writes where a source has float8, and what GPUs without its instructions need."""
_BFLOAT16_HEADER = (
    "#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 800)\n#include <cuda_bf16.h>",
    "#if 1  // The header converts bfloat16 where no instruction does.\n#include <cuda_bf16.h>",
)
"""The same of bfloat16."""
BFLOAT16_INSTRUCTIONS = (8, 0)
"""The first compute capability that computes in bfloat16."""


_BY_HEADERS = ("tvm.support.nvcc.supports_fp8", "tvm.support.nvcc.supports_bf16")


@contextmanager
def _dtypes_by_headers() -> Iterator[None]:
    """Have TVM leave float8 and bfloat16 to CUDA's headers on every GPU: these have arithmetic for GPUs without an instruction.

    TVM 0.27's own gives zero and subnormal numbers of float8 other values there, and compares vectors of eight, for which CUDA has no type.
    Of bfloat16 it makes 16-bit integers, as which no kernel that is CUDA text takes it, and loads that it refuses itself later.
    """
    before = {name: tvm_ffi.get_global_func(name) for name in _BY_HEADERS}
    for name in _BY_HEADERS:
        tvm_ffi.register_global_func(name, lambda _: True, override=True)
    try:
        yield
    finally:
        for name, func in before.items():
            tvm_ffi.register_global_func(name, func, override=True)


class _Generated(NamedTuple):
    """The code that TVM generates for a function."""

    library: Any
    """Host code, with CUDA source imported."""
    arch: str
    """The arch that the source is for; empty where there is none, but calls of a vendor's library."""
    hosts: tuple[Any, ...]
    """Bodies of the host functions, as TIR."""
    calls: tuple[Call, ...]
    tensor_maps: tuple[str, ...]
    """Arguments of the host's calls that encode TMA descriptors."""
    vendor_calls: tuple[str, ...]
    """The host's calls of vendors' libraries, with their arguments."""
    gives_nan: bool
    """Whether maxima and minima must give NaN where an operand is NaN."""


def _generated(func: Any, symbol: str, arch: Arch) -> _Generated:
    """Return the generated code, by the steps of tvm.tirx.build, whose result does not include the launches."""
    lower, finalize_host, finalize_device = tvm.tirx.get_tir_pipeline("tirx" if is_tirx(func) else "s_tir")
    host_target = tvm.target.Target("llvm")
    mod = tvm.IRModule({symbol: func})
    with tvm.transform.PassContext(config=_pass_config(func)), _source_only(), _dtypes_by_headers():
        bound = tvm.tirx.transform.BindTarget(_target(func, arch).with_host(host_target))(
            mod if is_tirx(func) else aligned_vectors(narrowed(mod))
        )
        host, devices = split_host_device_mods(lower(bound))
        vendor_calls = tuple(text for each in host.functions.values() for text in _named_calls(each.body, VENDOR_CALLS))
        if not devices:
            return _only_vendor_calls(host, finalize_host(), vendor_calls)
        # A template may have bound its function to another arch of the same GPU, such as sm_90a.
        [(device_target, device)] = devices.items()
        if is_tirx(func):
            host, device = with_declared_pdl(host, device)
        else:
            device = reworked(device)
            device = device if arch.the_gpu.compute_capability >= FLOAT8_INSTRUCTIONS else float8_by_bits(device)
            static = static_smem_bytes(device)
            if supports_pdl(arch.the_gpu):
                host, device = pdl_launches(host, arch.the_gpu, static), pdl_kernels(device, arch.the_gpu)
            host = with_smem_attribute(host, static)
        bodies = tuple(each.body for each in host.functions.values())
        calls = tuple(call for body in bodies for call in _calls(body))
        nan = any(gives_nan(carried(each, func)) for each in device.functions.values())
        library = tir_to_runtime(finalize_host()(host), {device_target: finalize_device()(device)}, host_target)
    tensor_maps = tuple(text for body in bodies for text in _named_calls(body, (_TENSOR_MAP,)))
    return _Generated(library, str(device_target.attrs["arch"]), bodies, calls, tensor_maps, vendor_calls, nan)


def _only_vendor_calls(host: tvm.IRModule, finalize: Any, vendor_calls: tuple[str, ...]) -> _Generated:
    """Return the code of a function that launches nothing itself; raise ValueError where it calls no vendor's library either."""
    if not vendor_calls:
        raise ValueError("no kernel: nothing is bound to threads")
    bodies = tuple(each.body for each in host.functions.values())
    for body in bodies:
        list(_calls(body))  # raises where the host computes anything
    return _Generated(tir_to_runtime(finalize(host), {}, tvm.target.Target("llvm")), "", bodies, (), (), vendor_calls, gives_nan=False)


def _pass_config(func: Any) -> dict[str, bool]:
    """Return the configuration of TVM's passes: storage is shared between buffers only where tiles are staged in shared memory.

    Elsewhere storage rewrite would place a thread's local values in the buffer of a cross-thread reduction: volatile shared memory.
    With staged tiles it must run, as fragments of tensor cores stay in registers only with what else that pass does. Fragments of WMMA
    do in any case, and sharing storage between those of several dtypes, as MetaSchedule's traces have them, is refused by a later pass.
    """
    scopes: set[str] = set()
    structural.structural_walk(
        func.body, [(tvm.s_tir.SBlock, lambda block: scopes.update(buffer.scope() for buffer in block.alloc_buffers))]
    )
    is_staged, is_wmma = (any(scope.startswith(kind) for scope in scopes) for kind in ("shared", "wmma."))
    return {**PASS_CONFIG, "tirx.disable_storage_rewrite": not is_staged or is_wmma}


def _target(func: Any, arch: Arch) -> tvm.target.Target:
    """Return the target of a function that names none: for TIRx the arch variant with wgmma, if the GPU has one."""
    if is_tirx(func) and arch.the_gpu.wgmma_arch:
        return target_of(replace(arch, tvm_target=tuple({**dict(arch.tvm_target), "arch": arch.the_gpu.wgmma_arch}.items())))
    return target_of(arch)


def _named_calls(body: Any, names: Collection[str]) -> list[str]:
    """Return the host's calls of functions, by name, with their arguments; encoding of TMA descriptors without a name, as ever."""
    found: list[str] = []

    def note(call: Any) -> None:
        name = str(getattr(call.args[0], "value", "")) if call.op.name in _BY_NAME else ""
        if name in names:
            found.append(", ".join(map(str, call.args[1 if name == _TENSOR_MAP else 0 :])))

    structural.structural_walk(body, [(tvm.ir.Call, note)])
    return found


def _calls(stmt: Any) -> Iterator[Call]:
    """Yield the launches of a host function in order of execution; raise ValueError if the host computes anything itself.

    TVM leaves on the host what is bound to no threads; it would access the GPU's memory from there, and crash.
    """
    if isinstance(stmt, tvm.tirx.BufferStore | tvm.tirx.For | tvm.tirx.While):
        raise ValueError("a part of the function is bound to no threads and would run on the host")  # noqa: TRY004  the schedule is at fault
    call = stmt.value if isinstance(stmt, tvm.tirx.Evaluate) else None
    if isinstance(call, tvm.ir.Call) and call.op.name == "tirx.call_ffi_kernel":
        params = [str(name) for name in call.attrs.launch_params]
        names = [name for name in params if "Idx." in name or name == _DYNAMIC_SMEM]  # the others are flags without a value
        extents = [int(extent) if isinstance(extent, tvm.tirx.IntImm) else str(extent) for extent in call.args[-len(names) :]]
        yield str(call.args[0].value), {**dict.fromkeys(params, 1), **dict(zip(names, extents, strict=True))}
    for part in (*getattr(stmt, "seq", ()), *(getattr(stmt, name, None) for name in ("body", "then_case", "else_case"))):
        if part is not None:
            yield from _calls(part)


def _launch(kernel: str, extents: Mapping[str, Extent], usage: Usage) -> Launch:
    def dims(name: str) -> tuple[Extent, Extent, Extent]:
        x, y, z = (extents.get(f"{name}Idx.{axis}", 1) for axis in "xyz")
        return x, y, z

    return Launch(
        kernel=kernel,
        grid=dims("block"),
        block=dims("thread"),
        dynamic_smem_bytes=int(extents.get(_DYNAMIC_SMEM, 0)),
        cluster=dims("clusterCta"),
        usage=usage,
    )


def _serialized(generated: _Generated, arch: Arch) -> tuple[bytes, str]:
    """Return the function table of the imported module, in its serialised form, and the module's source as nvcc gets it.

    The serialised form is: format, table, code, each preceded by its size. Here the format is "cuda".
    """
    library = generated.library
    source = str(library.imports[0].inspect_source("cuda"))
    packed = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")(library).numpy().tobytes()
    _, _, content = packed.split(sized(b"cuda"), 2)  # module kind "cuda", then format "cuda"
    functions = content.removesuffix(sized(source.encode()))
    assert functions != content, "TVM serialises source as it is"
    if arch.the_gpu.compute_capability < FLOAT8_INSTRUCTIONS:
        source = source.replace(*_FLOAT8_HEADER)
    if arch.the_gpu.compute_capability < BFLOAT16_INSTRUCTIONS:
        source = source.replace(*_BFLOAT16_HEADER)
    return functions, with_nan_in_cuda(source, in_one=has_instruction(arch.the_gpu)) if generated.gives_nan else source


def _host_object(library: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.o"
        library.write_to_file(str(path))
        return path.read_bytes()


def _flags(func: Any) -> tuple[str, ...]:
    """Return nvcc's flags: fast math where all inputs and outputs have at most 16 bits."""
    is_narrow = all(dtype_bytes(dtype) <= 2 for _, dtype in arguments_of(func))
    flags = nvcc.FAST_MATH_FLAGS if is_narrow else nvcc.FLAGS
    return (*flags, *nvcc.TIRX_FLAGS) if is_tirx(func) else flags


def _cubin(source: str, arch: str, flags: tuple[str, ...], store: BlobStore) -> Cubin:
    """Return the source's cubin, from the store if it is known there."""
    compiler = nvcc.compiler_for(arch)
    fields = {"source": digest(nvcc.prepared(source).encode()), "arch": arch, "flags": flags, "nvcc": compiler.version}
    described = manifest("cubin", fields)
    # Local: a cubin is reproducible, and no measurement refers to it.
    known = store.read("cubin", key(described), is_local=True)
    content = store.read_blob(known.result["cubin"]) if isinstance(known, Record) else None
    if isinstance(known, Record) and isinstance(content, bytes):
        return Cubin(content, {name: Usage(**usage) for name, usage in known.result["usage"].items()})
    cubin = nvcc.compile_cubin(source, arch, flags, headers_for(arch, flags))
    usage = {name: dataclasses.asdict(usage) for name, usage in cubin.usage.items()}
    store.write("cubin", described, {"cubin": store.write_blob(cubin.content), "usage": usage}, is_local=True)
    return cubin


def _code_digest(cubins: Sequence[str], launches: Sequence[Launch], func: Any, generated: _Generated) -> str:
    """Return the digest of what a measurement depends on; `cubins` are the digests of the device code, if there is any."""
    launched = [(launch.kernel, launch.grid, launch.block, launch.dynamic_smem_bytes) for launch in launches]
    # Launch attributes and TMA descriptors are in the host code alone.
    beyond = [[sorted(extents.items()) for _, extents in generated.calls], generated.tensor_maps] if is_tirx(func) else []
    beyond += [list(generated.vendor_calls)] if generated.vendor_calls else []
    return digest(json.dumps([*cubins, launched, arguments_of(func), *beyond]).encode())
