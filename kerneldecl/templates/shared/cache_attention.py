"""Owns what kernels of attention against a KV cache have in common: rows of queries, parts of the keys, addresses, the workspace.

Knows nothing of instructions, shared memory or the kernel's statements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from tvm import IRModule

from kerneldecl.analysis.attention_decode import DecodeSizes, takes_plain
from kerneldecl.compiler.attention import AttentionSpec, read_attention
from kerneldecl.compiler.attention_decode import DecodeSpec, read_attention_decode
from kerneldecl.compiler.canonical import signature_of

LOG2_E = math.log2(math.e)


class Partition(Protocol):
    """What parameters of all templates have."""

    @property
    def block_rows(self) -> int:
        """Return the rows of queries of a thread block."""
        ...

    @property
    def parts(self) -> int:
        """Return into how many parts a sequence's keys are cut whose results a second kernel combines; 1 for none."""
        ...


@dataclass(frozen=True)
class CacheComputation:
    """What a module computes: an attention against a KV cache, or one of few queries without lengths."""

    spec: DecodeSpec
    arguments: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape and dtype of each argument."""
    has_lengths: bool = True
    is_causal: bool = True

    @property
    def sizes(self) -> DecodeSizes:
        spec = self.spec
        return DecodeSizes(
            batch=spec.batch,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            queries=spec.queries,
            keys=spec.keys,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            dtype=spec.dtype,
            page_size=spec.page_size,
            is_latent=spec.is_latent,
            has_lengths=self.has_lengths,
        )


@dataclass(frozen=True)
class CacheAttention:
    """One kernel: thread blocks have some rows of queries that see the same head of keys, and a part of a sequence's keys."""

    computation: CacheComputation
    params: Partition
    sm_count: int
    pdl: bool
    """Whether the kernel overlaps the end of the preceding one."""

    @property
    def spec(self) -> DecodeSpec:
        return self.computation.spec

    @property
    def sizes(self) -> DecodeSizes:
        return self.computation.sizes

    @property
    def has_lengths(self) -> bool:
        return self.computation.has_lengths

    @property
    def is_causal(self) -> bool:
        return self.computation.is_causal

    @property
    def group_rows(self) -> int:
        return self.sizes.group_rows

    @property
    def row_blocks(self) -> int:
        """Return how many thread blocks share the rows that see a head of keys."""
        return -(-self.group_rows // self.params.block_rows)

    @property
    def units(self) -> int:
        """Return how many parts of the result there are."""
        return self.spec.batch * self.spec.kv_heads * self.row_blocks

    @property
    def parts(self) -> int:
        return self.params.parts

    def place(self, index: Any) -> tuple[Any, Any, tuple[Any, Any, Any]]:
        """Return the unit and the part of its keys that have an index, and the unit's sequence, head of keys, and first row of queries.

        Those that read the same keys are neighbours.
        """
        rows, of_head = index % self.row_blocks, index // self.row_blocks
        part, head = of_head % self.parts, of_head // self.parts
        batch, head_of_batch = head // self.spec.kv_heads, head % self.spec.kv_heads
        return head * self.row_blocks + rows, part, (batch, head_of_batch, rows * self.params.block_rows)

    @property
    def scale_log2(self) -> float:
        """Return what scores are multiplied by before powers of two are taken of them."""
        return self.spec.scale * LOG2_E

    # ---- addresses

    def row_stride(self, columns: int) -> int:
        """Return the elements from one key's row to the next one's."""
        return columns if self.spec.layout == "bhsd" else self.spec.kv_heads * columns

    def head_stride(self, columns: int) -> int:
        rows = self.spec.page_size or self.spec.keys
        return rows * columns if self.spec.layout == "bhsd" else columns

    def outer_stride(self, columns: int) -> int:
        """Return the elements from one sequence or page to the next one."""
        return (self.spec.page_size or self.spec.keys) * self.spec.kv_heads * columns

    def query_offset(self, batch: Any, kv_head: Any, row: Any, columns: int) -> Any:
        """Return where a row of Q or O begins; rows of a head of keys are ordered by queries, then by heads."""
        spec, group = self.spec, self.spec.group
        head, query = kv_head * group + row % group, row // group
        at = (head * spec.queries + query) if spec.layout == "bhsd" else (query * spec.heads + head)
        return (batch * (spec.heads * spec.queries) + at) * columns

    def limit(self, length: Any, row: Any) -> Any:
        """Return the first key that a row does not see."""
        return length - (self.spec.queries - 1) + row // self.spec.group if self.is_causal and self.spec.queries > 1 else length


def read_computation(mod: IRModule) -> CacheComputation | None:
    """Return the attention against a KV cache that a module's `main` computes, or the one of few queries; None if it is neither."""
    if spec := read_attention_decode(mod):
        return CacheComputation(spec, tuple(spec.arguments))
    if (plain := read_attention(mod)) and takes_plain(plain.sizes):
        spec = _contiguous(plain)
        names = [name for name, _, _ in spec.arguments if name != "lengths"]
        arguments = tuple((name, shape, dtype) for name, (shape, dtype) in zip(names, signature_of(mod["main"]), strict=True))
        return CacheComputation(spec, arguments, has_lengths=False, is_causal=plain.is_causal)
    return None


def _contiguous(spec: AttentionSpec) -> DecodeSpec:
    """Return an attention without lengths as one of a contiguous cache."""
    names = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "dtype", "scale", "layout")
    return DecodeSpec(**{name: getattr(spec, name) for name in names})
