"""Owns the text of a CUDA header that holds one entry's kernels and a C++ function that launches them.

Knows nothing of TVM, of how kernels are found, or of compilers.

Programs may include any number of headers, each in any number of files: device functions lie in an unnamed namespace, kernels
are weak symbols, and macros of the device code are undone at the header's end. Kernels keep C's names, since inline PTX reads
their parameters by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kerneldecl.export.argument import Argument, Function
from kerneldecl.export.host_calls import HostCalls, KernelCall, TensorMap

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*([<\"][^>\"]+[>\"]).*\n", re.MULTILINE)
_FOR_NVRTC = re.compile(r"^#ifdef __CUDACC_RTC__\n.*?^#else\n(.*?)^#endif[^\n]*\n", re.MULTILINE | re.DOTALL)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_KERNEL = 'extern "C" __global__'
_GENERATED = ("177", "550", "1046")
"""nvcc's warnings of unused variables and functions and of rounded constants, of which generated code has some."""
_ALIGNMENT_BYTES = 256
"""Of each workspace, as cudaMalloc aligns."""
_TYPES = {
    "float16": ("__half", "cuda_fp16.h"),
    "bfloat16": ("__nv_bfloat16", "cuda_bf16.h"),
    "float32": ("float", ""),
    "float64": ("double", ""),
    "float8_e4m3fn": ("__nv_fp8_e4m3", "cuda_fp8.h"),
    "float8_e5m2": ("__nv_fp8_e5m2", "cuda_fp8.h"),
    "bool": ("bool", ""),
    **{f"{sign}int{bits}": (f"std::{sign}int{bits}_t", "") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""C++ types of the dtypes, with the header of CUDA that has them."""
_MAP_TYPES = {
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), "UINT8"),
    **dict.fromkeys(("int16", "uint16"), "UINT16"),
    **{name: name.upper() for name in ("float16", "bfloat16", "float32", "float64", "int32", "uint32", "int64", "uint64")},
}
"""Elements of TMA descriptors, as the driver's CUtensorMapDataType names them. The TMA copies bytes: signs do not matter."""


_LAUNCHER = """\
struct launch_shape {
  dim3 grid, block, cluster;
  int dynamic_smem_bytes;
  bool is_pdl, is_cooperative;
};

inline cudaError_t launch_kernel(const void* kernel, const launch_shape& shape, cudaStream_t stream, void** arguments) {
  const unsigned cluster_blocks = shape.cluster.x * shape.cluster.y * shape.cluster.z;
  cudaError_t error = cudaSuccess;
  if (shape.dynamic_smem_bytes > 0) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.dynamic_smem_bytes);
  }
  if (error == cudaSuccess && cluster_blocks > 8) {  // up to eight blocks are portable
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (cluster_blocks > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = shape.cluster.x;
    attributes[count].val.clusterDim.y = shape.cluster.y;
    attributes[count++].val.clusterDim.z = shape.cluster.z;
  }
  if (shape.is_pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.is_cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.dynamic_smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}
"""
_ENCODER = """\
// The driver's function for TMA descriptors, looked up at run time: programs need not link libcuda.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult state{};
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &state);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &state);
#endif
    const bool is_found = error == cudaSuccess && state == cudaDriverEntryPointSuccess;
    return is_found ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry) : nullptr;
  }();
  return found;
}
"""


@dataclass(frozen=True)
class CudaKernel:
    """What a header is made of."""

    function: Function
    source: str
    """Device code."""
    arch: str
    flags: tuple[str, ...]
    host: HostCalls


def _declared(argument: Argument) -> str:
    """Return an argument's declaration."""
    c_type = _TYPES[argument.dtype][0] if argument.dtype in _TYPES else "void"
    return f"{'' if argument.is_output else 'const '}{c_type}* {argument.name}"


def compile_flags(kernel: CudaKernel) -> str:
    """Return nvcc's flags that give the code which was measured."""
    meant = [flag for flag in kernel.flags if flag.startswith(("-O", "-std", "--expt", "--use_fast", "--ptxas-options=--register"))]
    return " ".join([f"-gencode arch={kernel.arch.replace('sm_', 'compute_')},code={kernel.arch}", *meant])


def cuda_header(kernel: CudaKernel) -> str:
    """Return the header's text."""
    device = _FOR_NVRTC.sub(r"\1", kernel.source)
    includes = dict.fromkeys(["<cuda.h>", "<cuda_runtime.h>", "<cstddef>", "<cstdint>", *_INCLUDE.findall(device), *_type_headers(kernel)])
    macros = list(dict.fromkeys(_MACRO.findall(device)))
    functions, kernels = _halves(_INCLUDE.sub("", device))
    lines = [
        *_head(kernel),
        "#pragma once",
        *(f"#include {name}" for name in includes),
        "",
        *(f'#pragma push_macro("{name}")\n#undef {name}' for name in macros),
        "#pragma nv_diagnostic push",
        f"#pragma nv_diag_suppress {', '.join(_GENERATED)}",
        f"namespace kerneldecl_{kernel.function.name} {{",
        "namespace {",
        "// Overloads for 16-bit floats follow; they must not hide CUDA's own.",
        "using ::max;",
        "using ::min;",
        "",
        functions,
        "",
        _LAUNCHER,
        *([_ENCODER] if any(isinstance(call, TensorMap) for call in kernel.host.calls) else []),
        "}  // namespace",
        "",
        kernels,
        "",
        *kernel.function.constants(),
        f"}}  // namespace kerneldecl_{kernel.function.name}",
        "#pragma nv_diagnostic pop",
        *(f'#pragma pop_macro("{name}")' for name in macros),
        "",
        *_function(kernel),
    ]
    return "\n".join(lines) + "\n"


def _halves(device: str) -> tuple[str, str]:
    """Return the functions that the kernels call, and the kernels."""
    at = device.index(_KERNEL)
    kernels = device[at:].replace(_KERNEL, f"{_KERNEL} __attribute__((weak))")
    return device[:at].strip("\n"), kernels.strip("\n")


def _type_headers(kernel: CudaKernel) -> Iterator[str]:
    yield from (f"<{_TYPES[each.dtype][1]}>" for each in kernel.function.arguments if each.dtype in _TYPES and _TYPES[each.dtype][1])


def _head(kernel: CudaKernel) -> list[str]:
    name = kernel.function.name
    notes = ["Arrays are row-major, in the GPU's memory, and begin at multiples of 16 bytes."]
    if kernel.host.workspaces:
        notes += [
            f"A call needs {name}_workspace_bytes bytes of the GPU's memory: it takes them from the stream's memory pool,",
            "or, which is faster, from a last argument, void* workspace. Calls that may overlap must not share that.",
        ]
    return kernel.function.head([f"compile with: nvcc {compile_flags(kernel)}"], f"cudaError_t {name}(stream, ", notes)


def _function(kernel: CudaKernel) -> Iterator[str]:
    name = kernel.function.name
    declared = ", ".join(["cudaStream_t stream", *map(_declared, kernel.function.arguments)])
    offsets, size_bytes = _offsets(kernel.host)
    yield f"static constexpr std::size_t {name}_workspace_bytes = {size_bytes};"
    yield ""
    yield f"static inline cudaError_t {name}({declared}, void* {'workspace' if offsets else '/*workspace*/'}) {{"
    yield f"  namespace own = kerneldecl_{name};"
    for each, offset in offsets:
        yield f"  void* {each} = static_cast<char*>(workspace) + {offset};"
    for call in kernel.host.calls:
        yield from _tensor_map(call) if isinstance(call, TensorMap) else _launch(call)
    yield "  return cudaSuccess;"
    yield "}"
    yield from _without_workspace(kernel, declared)


def _offsets(host: HostCalls) -> tuple[list[tuple[str, int]], int]:
    """Return where in the workspace each of its parts begins, and its size."""
    offsets, at = [], 0
    for each in host.workspaces:
        offsets.append((each.name, at))
        at += -(-each.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, at


def _tensor_map(call: TensorMap) -> Iterator[str]:
    name, rank = call.name, len(call.shape)

    def numbers(values: Sequence[int]) -> str:
        return f"{{{', '.join(map(str, values))}}}"

    yield f"  CUtensorMap {name};"
    yield "  {"
    yield f"    const cuuint64_t shape[] = {numbers(call.shape)}, strides[] = {numbers(call.strides_bytes or (0,))};"
    yield f"    const cuuint32_t box[] = {numbers(call.box)}, steps[] = {numbers(call.element_strides)};"
    yield "    const auto encode = own::tensor_map_encoder();"
    yield "    if (!encode) return cudaErrorNotSupported;"
    yield f"    void* const address = const_cast<void*>(static_cast<const void*>({call.address}));"
    kinds = ("CUtensorMapInterleave", "CUtensorMapSwizzle", "CUtensorMapL2promotion", "CUtensorMapFloatOOBfill")
    modes = ", ".join(f"static_cast<{kind}>({value})" for kind, value in zip(kinds, call.modes, strict=True))
    yield f"    if (encode(&{name}, CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES[call.dtype]}, {rank}, address, shape, strides, box, steps,"
    yield f"               {modes}) != CUDA_SUCCESS) return cudaErrorInvalidValue;"
    yield "  }"


def _launch(call: KernelCall) -> Iterator[str]:
    kernel = f"reinterpret_cast<const void*>(own::{call.kernel})"
    # The launch copies what each pointer leads to: an address, or a descriptor by value.
    held = ", ".join(f"const_cast<void*>(static_cast<const void*>(&{name}))" for name in call.arguments)
    grid, block, cluster = (f"dim3({', '.join(map(str, dims))})" for dims in (call.grid, call.block, call.cluster))
    features = ", ".join(str(each).lower() for each in (call.is_pdl, call.is_cooperative))
    yield "  {"
    yield f"    void* arguments[] = {{{held}}};"
    yield f"    const own::launch_shape shape = {{{grid}, {block}, {cluster}, {call.dynamic_smem_bytes}, {features}}};"
    yield f"    const cudaError_t error = own::launch_kernel({kernel}, shape, stream, arguments);"
    yield "    if (error != cudaSuccess) return error;"
    yield "  }"


def _without_workspace(kernel: CudaKernel, declared: str) -> Iterator[str]:
    names, has_workspace = ", ".join(["stream", *(each.name for each in kernel.function.arguments)]), bool(kernel.host.workspaces)
    yield ""
    yield f"static inline cudaError_t {kernel.function.name}({declared}) {{"
    if has_workspace:
        yield "  void* workspace = nullptr;"
        yield f"  const cudaError_t allocated = cudaMallocAsync(&workspace, {kernel.function.name}_workspace_bytes, stream);"
        yield "  if (allocated != cudaSuccess) return allocated;"
        yield f"  const cudaError_t launched = {kernel.function.name}({names}, workspace);"
        yield "  const cudaError_t freed = cudaFreeAsync(workspace, stream);"
        yield "  return launched != cudaSuccess ? launched : freed;"
    else:
        yield f"  return {kernel.function.name}({names}, static_cast<void*>(nullptr));"
    yield "}"
