"""Owns the function of an artifact that takes any number of rows: it looks at a call's rows in a table, and calls the kernel that is there.

Knows nothing of how kernels were chosen. The function has the C interface of tvm-ffi, as kernels have, and hands arguments on as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kerneldecl.store.keys import digest
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.toolchain.cxx import compiler, run

_SOURCE = """
#include <cstdint>
#include <cstdio>

// The parts of tvm-ffi's C interface (tvm/ffi/c_api.h) and of DLPack that are needed; both are stable.
struct Any {{
  int32_t type_index;
  uint32_t zero_padding;
  union {{ int64_t integer; void* pointer; }};
}};
struct Object {{ uint64_t ref_count; int32_t type_index; uint32_t padding; void* deleter; }};
struct Tensor {{
  void* data;
  int32_t device_type, device_id, ndim;
  uint32_t dtype;
  int64_t* shape;
}};
constexpr int32_t kTensorPointer = 7, kTensorObject = 70;
typedef int (*Kernel)(void*, const Any*, int32_t, Any*);

extern "C" void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
{declarations}

static const struct {{ int64_t upto; Kernel kernel; }} kTable[] = {{
{table}
}};

extern "C" __attribute__((visibility("default"))) int __tvm_ffi_{symbol}(void* self, const Any* args, int32_t count, Any* result) {{
  const Tensor* tensor = nullptr;
  if (count > {argument}) {{
    const Any& given = args[{argument}];
    if (given.type_index == kTensorPointer) tensor = static_cast<const Tensor*>(given.pointer);
    if (given.type_index == kTensorObject) tensor = reinterpret_cast<const Tensor*>(static_cast<const Object*>(given.pointer) + 1);
  }}
  // What is no tensor of so many dimensions is refused by any of the kernels, in their words.
  if (!tensor || tensor->ndim <= {dim}) return kTable[0].kernel(self, args, count, result);
  const int64_t rows = tensor->shape[{dim}];
  if (rows >= 1) {{
    for (const auto& range : kTable) {{
      if (rows <= range.upto) return range.kernel(self, args, count, result);
    }}
  }}
  char message[512];
  snprintf(message, sizeof message, "%lld rows are given; {name} takes 1 to {upto}", static_cast<long long>(rows));
  TVMFFIErrorSetRaisedFromCStr("ValueError", message);
  return -1;
}}
"""


@dataclass(frozen=True)
class RowsDispatch:
    """One function, and the kernels that it calls."""

    symbol: str
    name: str
    """Name of the entries that it stands for, as it is shown."""
    argument: int
    dim: int
    """Where a call has its number of rows."""
    table: tuple[tuple[int, str], ...]
    """The last number of each range, ascending, and the symbol of its kernel."""

    def source(self) -> str:
        symbols = dict.fromkeys(symbol for _, symbol in self.table)
        return _SOURCE.format(
            declarations="\n".join(f'extern "C" int __tvm_ffi_{symbol}(void*, const Any*, int32_t, Any*);' for symbol in symbols),
            table="\n".join(f"  {{{upto}, __tvm_ffi_{symbol}}}," for upto, symbol in self.table),
            symbol=self.symbol,
            argument=self.argument,
            dim=self.dim,
            name=self.name.replace("\\", "").replace('"', "").replace("%", ""),
            upto=self.table[-1][0],
        )


def dispatch_digest() -> str:
    """Return a digest of the function's C++, which libraries hold beside kernels of rows at run time."""
    return digest(_SOURCE.encode())


def compile_dispatch(dispatch: RowsDispatch) -> bytes:
    """Return the object file of a function; raise ToolchainError where the C++ compiler refuses it."""
    with scratch_folder() as folder:
        source, made = folder / "dispatch.cpp", folder / "dispatch.o"
        source.write_text(dispatch.source(), encoding="utf-8")
        run(
            [compiler(), "-std=c++17", "-O2", "-fPIC", "-c", source.name, "-o", made.name],
            folder,
            f"compiling the dispatch of {dispatch.name}",
        )
        return Path(made).read_bytes()
