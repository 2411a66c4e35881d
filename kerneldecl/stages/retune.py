"""Owns what is asked before entries are tuned again that are up to date: whether this machine can.

Knows nothing of how entries are tuned.
"""

from __future__ import annotations

from kerneldecl.errors import ToolchainError
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.planning.plan import Plan
from kerneldecl.stages.session import Options


def check_retuned(plan: Plan, options: Options) -> None:
    """Raise ToolchainError where an entry is to be tuned again whose device is not here: a guess must not replace what was measured."""
    archs = {e.arch.name: (e.arch, e.entry) for e in reversed(plan.entries) if e.entry in options.retuned | options.reverified}
    for arch, entry in archs.values():
        if options.scheduler or options.rpc:
            continue  # whether a worker has it is known once there are any
        if reason := why_not_measured_here(arch):
            raise ToolchainError(f"{entry} cannot be tuned again here: {reason}; what was measured of it stays")
