"""Owns the text of a C++ header that holds one entry's kernel for a CPU, and what the kernel needs in place of TVM's runtime.

Knows nothing of TVM's compiler, of how kernels are found, or of compilers.

The loops are assembly, as LLVM has made them of the schedule: the very instructions that were measured. TVM 0.27's generator
of C source refuses vectors of more than 16 lanes ("Cannot convert type float32x64 to C type"), which most schedules have, and
what a C++ compiler makes of scalar loops is another kernel. Symbols and labels carry the function's name, and are local to
each file that includes the header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kerneldecl.export.argument import Function
from kerneldecl.model import dtype_bytes

_SECTION = re.compile(r"^\t\.(section|text|data|bss)\b")
_DROPPED = re.compile(r"^\t\.(file|loc|ident|addrsig|addrsig_sym|globl|weak|hidden|cfi_sections)\b|^\.Ltmp\d+:")
"""Directives of debug information, and those that make symbols known to other files."""
_LABEL = re.compile(r"^([A-Za-z_][\w.$]*):", re.MULTILINE)
_RUNTIME = re.compile(r"\b(?:__)?TVM(?:Backend|FFI)\w+")
_STANDARD = ("algorithm", "atomic", "condition_variable", "cstddef", "cstdint", "cstdlib", "memory", "mutex", "thread", "vector")
_PROVIDED = {
    "__TVMBackendAllocWorkspace",
    "__TVMBackendFreeWorkspace",
    "__TVMBackendParallelLaunch",
    "TVMFFIErrorSetRaisedFromCStrParts",
}
"""What the header has in place of TVM's runtime."""
_KINDS = (("int", 0), ("uint", 1), ("float8_e4m3fn", 10), ("float8_e5m2", 12), ("float", 2), ("bfloat", 4), ("bool", 6))
"""DLPack's codes of dtypes by how their names begin (dlpack.h 1.1, DLDataTypeCode)."""
_TYPES = {
    "float16": "std::uint16_t",
    "bfloat16": "std::uint16_t",
    "float8_e4m3fn": "std::uint8_t",
    "float8_e5m2": "std::uint8_t",
    "float32": "float",
    "float64": "double",
    "bool": "bool",
    **{f"{sign}int{bits}": f"std::{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""C++ types of the dtypes; floats of 8 and 16 bits are given by their bits."""
_DLTENSOR = 7
"""TVM's type index of a pointer to a DLTensor (tvm/ffi/c_api.h, kTVMFFIDLTensorPtr)."""


@dataclass(frozen=True)
class CpuKernel:
    """What a header is made of."""

    function: Function
    assembly: str
    symbol: str
    """Of the kernel, under which TVM's convention of calls has it as __tvm_ffi_<symbol>."""
    processor: str
    """LLVM's name of the CPU that it is for."""
    machine: str = "x86_64"
    """As `uname -m` and compilers' macros name it."""


def cpu_header(kernel: CpuKernel) -> str:
    """Return the header's text; raise ValueError where the kernel needs more of TVM's runtime than the header provides."""
    if missing := sorted(set(_RUNTIME.findall(kernel.assembly)) - _PROVIDED):
        raise ValueError(f"the kernel calls {', '.join(missing)} of TVM's runtime, which headers do not provide")
    prefix = f"kerneldecl_{kernel.function.name}"
    code = [*_local(kernel.assembly, prefix), *_absent(kernel.assembly, prefix)]
    lines = [
        *_head(kernel),
        "#pragma once",
        f"#if !defined(__{kernel.machine}__)",
        f'#error "{kernel.function.name} is for {kernel.machine}"',
        "#endif",
        *(f"#include <{name}>" for name in _STANDARD),
        "",
        *_RUNTIME_SOURCE.replace("PREFIX", prefix).splitlines(),
        *kernel.function.constants(),
        f"}}  // namespace {prefix}",
        "",
        'asm(R"ASSEMBLY(',
        *code,
        "\t.text",
        ')ASSEMBLY");',
        "",
        *_function(kernel, prefix),
    ]
    return "\n".join(lines) + "\n"


def _local(assembly: str, prefix: str) -> list[str]:
    """Return assembly whose symbols and labels begin with a prefix and are local, without debug information."""
    own = [*_LABEL.findall(assembly), *_PROVIDED]
    symbols = re.compile(rf"(?<![\w.$])({'|'.join(sorted(map(re.escape, set(own)), key=len, reverse=True))})(?![\w$])")
    kept, is_debug = [], False
    for line in assembly.splitlines():
        if _SECTION.match(line):
            is_debug = ".debug" in line or ".note" in line
        if not is_debug and not _DROPPED.match(line):
            kept.append(symbols.sub(rf"{prefix}_\1", line.replace(".L", f".L{prefix}_")))
    return kept


def _absent(assembly: str, prefix: str) -> Iterator[str]:
    """Yield definitions of the pointers to TVM's runtime that a kernel does not have because it needs none."""
    for name in sorted(_PROVIDED - set(_LABEL.findall(assembly))):
        if name.startswith("__"):
            yield from ("\t.bss", "\t.p2align 3", f"{prefix}_{name}:", "\t.quad 0")


def _head(kernel: CpuKernel) -> list[str]:
    # The assembler of x86-64 takes every instruction; that of aarch64 only those of its target processor.
    processor = f" -mcpu={kernel.processor}" if kernel.machine == "aarch64" and kernel.processor != "generic" else ""
    compiled = [f"compile with: g++ -O2 -std=c++17 -pthread{processor}", f"The CPU must have what LLVM calls {kernel.processor}."]
    notes = [
        "Arrays are row-major. Floats of 8 and 16 bits are given by their bits. Returns 0, or -1 where an array is a null pointer or",
        "memory is short.",
    ]
    return kernel.function.head(compiled, f"int {kernel.function.name}(", notes)


def _function(kernel: CpuKernel, prefix: str) -> Iterator[str]:
    declared = ", ".join(
        f"{'' if each.is_output else 'const '}{_TYPES.get(each.dtype, 'void')}* {each.name}" for each in kernel.function.arguments
    )
    yield f"static inline int {kernel.function.name}({declared}) {{"
    yield f"  namespace own = {prefix};"
    held, values = [], []
    for at, each in enumerate(kernel.function.arguments):
        code = next(code for name, code in _KINDS if each.dtype.startswith(name))
        extents = ", ".join(map(str, each.shape or (1,)))
        yield f"  static std::int64_t shape{at}[] = {{{extents}}};"
        address = f"const_cast<void*>(static_cast<const void*>({each.name}))"
        held.append(f"{{{address}, 1, 0, {len(each.shape)}, {code}, {8 * dtype_bytes(each.dtype)}, 1, shape{at}, nullptr, 0}}")
        values.append(f"{{{_DLTENSOR}, 0, &tensors[{at}]}}")
    yield "  own::tensor tensors[] = {"
    yield from (f"      {each}," for each in held)
    yield "  };"
    yield f"  const own::value arguments[] = {{{', '.join(values)}}};"
    yield "  own::value result = {};"
    yield "  own::provide();"
    yield f"  return own::{prefix}___tvm_ffi_{kernel.symbol}(nullptr, arguments, {len(kernel.function.arguments)}, &result);"
    yield "}"


_RUNTIME_SOURCE = """\
namespace PREFIX {
namespace {

// DLTensor of dlpack.h and TVMFFIAny of tvm/ffi/c_api.h: what the kernel takes.
struct tensor {
  void* data;
  std::int32_t device_type, device_id, ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};
struct value {
  std::int32_t type_index;
  std::uint32_t padding;
  void* pointer;
};

// Workspaces of a thread, kept for its next call.
struct workspace {
  void* data;
  std::size_t size_bytes;
  bool is_taken;
};
struct workspaces {
  std::vector<workspace> held;
  ~workspaces() {
    for (const workspace& each : held) std::free(each.data);
  }
};
inline workspaces& mine() {
  static thread_local workspaces found;
  return found;
}
inline void* allocate(int, int, std::uint64_t asked, int, int) {
  const std::size_t size_bytes = (static_cast<std::size_t>(asked) + 63) / 64 * 64;
  for (workspace& each : mine().held) {
    if (each.is_taken || each.size_bytes < size_bytes) continue;
    each.is_taken = true;
    return each.data;
  }
  void* data = std::aligned_alloc(64, size_bytes);
  if (data) mine().held.push_back({data, size_bytes, true});
  return data;
}
inline int release(int, int, void* data) {
  for (workspace& each : mine().held) each.is_taken = each.is_taken && each.data != data;
  return 0;
}

// A parallel loop: each task is given its number, and how many there are. Threads are started at the first one, and wait for more.
struct group {
  void* barrier;
  std::int32_t count;
};
using task = int (*)(int, group*, void*);
struct pool {
  struct loop {
    task run;
    void* closure;
    group tasks;
    std::atomic<int> next{0}, left;
    std::atomic<bool> failed{false};
  };
  std::mutex alone, changing;
  std::condition_variable changed;
  std::atomic<unsigned> started{0};
  std::shared_ptr<loop> current;
  int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));

  pool() {
    for (int at = 1; at < threads; ++at) std::thread([this] { serve(); }).detach();
  }
  static void work(loop& todo) {
    for (int at = todo.next++; at < todo.tasks.count; at = todo.next++) {
      if (todo.run(at, &todo.tasks, todo.closure) != 0) todo.failed = true;
      --todo.left;
    }
  }
  static constexpr int spins = 500;  // looks for work before a thread sleeps: loops of one program often come close together
  void serve() {
    for (unsigned seen = 0;;) {
      for (int spin = 0; spin < spins && started == seen; ++spin) std::this_thread::yield();
      std::shared_ptr<loop> todo;
      {
        std::unique_lock<std::mutex> lock(changing);
        changed.wait(lock, [&] { return started != seen; });
        seen = started;
        todo = current;
      }
      work(*todo);
    }
  }
  int run(task run, void* closure, int asked) {
    std::lock_guard<std::mutex> one_at_a_time(alone);
    auto todo = std::make_shared<loop>();
    todo->run = run;
    todo->closure = closure;
    todo->tasks = {nullptr, asked > 0 ? asked : threads};
    todo->left = todo->tasks.count;
    {
      std::lock_guard<std::mutex> lock(changing);
      current = todo;
      ++started;
    }
    changed.notify_all();
    work(*todo);
    while (todo->left > 0) std::this_thread::yield();
    return todo->failed ? -1 : 0;
  }
};
inline int launch(task run, void* closure, int asked) {
  static pool* const threads = new pool;  // never destroyed: its threads run until the process ends
  return threads->run(run, closure, asked);
}

}  // namespace

// What the assembly below calls, or defines.
extern "C" {
__attribute__((weak, used, visibility("hidden"))) void PREFIX_TVMFFIErrorSetRaisedFromCStrParts(const char*, const char**, int) {}
__attribute__((visibility("hidden"))) extern void* PREFIX___TVMBackendAllocWorkspace;
__attribute__((visibility("hidden"))) extern void* PREFIX___TVMBackendFreeWorkspace;
__attribute__((visibility("hidden"))) extern void* PREFIX___TVMBackendParallelLaunch;
__attribute__((visibility("hidden"))) int PREFIX___tvm_ffi_PREFIX(void*, const value*, std::int32_t, value*);
}

namespace {
inline void provide() {
  static const bool is_provided = [] {
    PREFIX___TVMBackendAllocWorkspace = reinterpret_cast<void*>(&allocate);
    PREFIX___TVMBackendFreeWorkspace = reinterpret_cast<void*>(&release);
    PREFIX___TVMBackendParallelLaunch = reinterpret_cast<void*>(&launch);
    return true;
  }();
  static_cast<void>(is_provided);
}
}  // namespace

"""
