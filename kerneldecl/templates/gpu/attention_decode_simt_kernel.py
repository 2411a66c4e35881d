"""Owns what an attention's sizes and layout make of the CUDA text of its kernel on CUDA cores, and the function around it.

Knows nothing of how parameters are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx

from kerneldecl.analysis.attention_decode_simt import COMBINED, DecodeSimtParams, width
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.gpu.attention_decode_combine import Workspace, combining
from kerneldecl.templates.gpu.attention_decode_simt_text import CONSTANTS, FUNCTIONS, KERNEL, STORE, STORE_PART
from kerneldecl.templates.gpu.attention_simt_text import POWERS
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, bodies
from kerneldecl.templates.gpu.cuda_types import access_type, cuda_type, widened
from kerneldecl.templates.shared.cache_attention import CacheAttention

FUNCTION = "decode"


@dataclass(frozen=True)
class DecodeSimtKernel(CacheAttention):
    """The attention, and the template's parameters."""

    params: DecodeSimtParams

    @property
    def grid(self) -> int:
        return self.units * self.parts


def build(kernel: DecodeSimtKernel) -> tvm.IRModule:
    """Return a module whose `main` is the attention: one kernel, and a second one where several thread blocks share keys."""
    arguments, params = kernel.computation.arguments, kernel.params
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in arguments}
    workspace = Workspace.of(kernel)
    to = {"O": buffers["O"]} if kernel.parts == 1 else {"parts": workspace.results, "part_sums": workspace.stats}
    names = (*(name for name, _, _ in arguments if name != "O"), *to)
    smem = ("float32", params.smem_floats(kernel.spec.value_dim))
    main = CudaKernel(FUNCTION, names, kernel.grid, params.threads, smem, ctas_per_sm=params.blocks)
    function = CudaFunction(arguments=arguments, workspaces={}, text=decode_source(kernel, names), kernels=[main], pdl=kernel.pdl)
    [body] = bodies(function, buffers | to)
    if kernel.parts > 1:
        allocated = map(tirx.AllocBuffer, to.values())
        body = tirx.SeqStmt([*allocated, body, combining(kernel, buffers, workspace)])
    func = tirx.PrimFunc(list(buffers.values()), body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})


def decode_source(kernel: DecodeSimtKernel, names: tuple[str, ...]) -> str:
    """Return the CUDA text of the kernel, whose function takes buffers of these names."""
    return "".join((_constants(kernel), POWERS, FUNCTIONS, _kernel(kernel, names)))


def _constants(kernel: DecodeSimtKernel) -> str:
    spec, elements = kernel.spec, width(kernel.sizes)
    return CONSTANTS.format(
        **kernel.params._asdict(),
        width=elements,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        keys=spec.keys,
        queries=spec.queries,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        page_size=spec.page_size,
        is_latent=_bool(spec.is_latent),
        has_lengths=_bool(kernel.has_lengths),
        is_causal=_bool(kernel.is_causal and spec.queries > 1),
        is_bhsd=_bool(spec.layout == "bhsd"),
        scale_log2=f"{kernel.scale_log2!r}f",
        item=cuda_type(spec.dtype),
        access=access_type(elements * dtype_bytes(spec.dtype)),
        columns_bytes=min(4 * elements, VECTOR_BYTES),
        widen=widened(spec.dtype, "float32"),
    )


def _kernel(kernel: DecodeSimtKernel, names: tuple[str, ...]) -> str:
    spec = kernel.spec
    return KERNEL.format(
        function=FUNCTION,
        parameters=", ".join(map(_parameter, names)),
        length="min(max(lengths[batch], 0), KEYS)" if kernel.has_lengths else "KEYS",
        v="K" if spec.is_latent else "V",
        table="page_table + batch * PAGES" if spec.page_size else "nullptr",
        k_outer=kernel.outer_stride(spec.head_dim),
        k_head=kernel.head_stride(spec.head_dim),
        k_row=kernel.row_stride(spec.head_dim),
        v_outer=kernel.outer_stride(spec.value_dim),
        v_head=kernel.head_stride(spec.value_dim),
        v_row=kernel.row_stride(spec.value_dim),
        values="keys" if spec.is_latent else "values",
        store=STORE.format(access=access_type(COMBINED * dtype_bytes(spec.dtype))) if kernel.parts == 1 else STORE_PART,
    )


def _parameter(name: str) -> str:
    if name in ("parts", "part_sums"):
        return f"float* __restrict__ {name}"
    if name in ("page_table", "lengths"):
        return f"const int* __restrict__ {name}"
    return f"{'' if name == 'O' else 'const '}Word* __restrict__ {name}"


def _bool(value: object) -> str:
    return "true" if value else "false"
