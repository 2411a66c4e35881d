"""Owns the limits that a user declares: of a result's error, of a search, of what a worker may use for a request.

Knows nothing of processes, or of what searches and requests do.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOLERANCE = 1.0
"""Relative error from which on a kernel that writes zeros would pass."""
Budget = tuple[tuple[str, float], ...]
"""Limits of a search, sorted by name: `trials`, `seconds`, and `stop_at`, the share of the device's peak at which it ends."""
BUDGET = ("trials", "seconds", "stop_at")
SHARED_SECONDS = "shared_seconds"
"""The limit that stands in each entry's budget where all entries together may take so many seconds."""


@dataclass(frozen=True)
class Limits:
    """What a request to a worker may use: seconds by what it does, memory, output; and the store. No result depends on them."""

    build_secs: float = 60.0
    """Of lowering a rule, and of building one candidate."""
    propose_secs: float = 20.0
    """Of asking a policy for the candidates of one entry."""
    search_secs: float = 120.0
    """Of asking a policy that searches for its next candidates."""
    prepare_secs: float = 120.0
    """Of making an entry's inputs and reference."""
    verify_secs: float = 20.0
    """Of one candidate's verification."""
    sample_secs: float = 120.0
    """Of one sample of a candidate's time."""
    memory_gib: float = 0.0
    """Private memory of a process; 0: three quarters of the machine's."""
    output_mib: float = 256.0
    """What a request may print, and its answer."""
    store_gb: float = 10.0
    """What the store may hold after a build, besides what is in use."""
