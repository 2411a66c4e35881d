"""Owns the policy `auto`: every policy with a rank for the kind of arch (`AUTO`), in the order of these ranks.

Knows nothing of how they choose. A policy that proposes nothing, or nothing that passes verification, leaves the workload to the next.
"""

from __future__ import annotations

STANDS_FOR = "all"
