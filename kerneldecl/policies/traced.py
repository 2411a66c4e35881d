"""Owns the policy `traced`: `auto` for kernels that TVM's database can hold, and every compiler for the arch can compile.

Knows nothing of how policies choose. Policies whose kernels may be PrimFuncs without a trace (`HAS_TRACES = False`) are left out.
"""

from __future__ import annotations

STANDS_FOR = "traced"
