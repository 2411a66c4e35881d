"""Owns attention by cuDNN, called from a function of our own: float16 and bfloat16, causal or not, grouped heads, logarithms of sums.

Knows nothing of schedules, and recognises attention by its computation, never by its names. Windows, masks, slopes, caps and packed
arguments are left to others.

Parameters:
  library     cudnn
  version     the library's version, as far as it counts: a kernel refuses to run with another one
  engine      place in what cuDNN's heuristic returns, from 0 on
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tvm import IRModule, tirx

from kerneldecl.analysis.attention import library_takes
from kerneldecl.compiler.attention import AttentionSpec, read_attention
from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared.vendor_call import NULL, function_of, vendor_call
from kerneldecl.toolchain.companions import CUDNN_ATTENTION

_DATA_TYPES = MappingProxyType({"float16": 2, "bfloat16": 9})
"""cudnnDataType_t of cudnn_graph.h."""
_ANY_KEY, _SAME_NUMBER, _FROM_THE_LAST = range(3)


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return a function that calls cuDNN, or None where the function is no attention that cuDNN takes."""
    spec = read_attention(mod) if arch.gpu else None
    if spec is None or not library_takes(spec.sizes):
        return None
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in spec.arguments}
    addresses = [buffers[name].data if name in buffers else NULL for name in ("Q", "K", "V", "O", "logsumexp")]
    numbers = (
        *(params["engine"], _DATA_TYPES[spec.dtype], int(spec.layout == "bshd"), spec.batch, spec.heads, spec.kv_heads),
        *(spec.queries, spec.keys, spec.head_dim, spec.value_dim, _last_key(spec)),
    )
    call = vendor_call(CUDNN_ATTENTION, params["version"], *addresses, tirx.const(spec.scale, "float64"), *numbers)
    return function_of(list(buffers.values()), call)


def _last_key(spec: AttentionSpec) -> int:
    """Return what the last key that a query sees is counted from, as cudnn_attention.cpp numbers it."""
    if spec.band.upper is None:
        return _ANY_KEY
    return _SAME_NUMBER if spec.band.upper == 0 else _FROM_THE_LAST
