"""Owns the policy `auto`: every policy that says for which kind of arch `auto` asks it (`AUTO`), in the order that they give.

Knows nothing of how they choose. A policy that proposes nothing, or nothing that passes verification, leaves the workload to the next.
"""

from __future__ import annotations

STANDS_FOR = "all"
