"""Owns how two consumer warpgroups take turns: whose MMAs may start, and the stages that are the other one's.

Knows nothing of what they multiply.
"""

from __future__ import annotations

from tvm.script import tirx as T


@T.inline
def skip(kernel, state, k_tiles):
    """Pass over stages that another consumer takes."""
    state.stage = state.stage + k_tiles
    state.phase = T.bitwise_xor(state.phase, state.stage // kernel.params.stages % 2)
    state.stage = state.stage % kernel.params.stages


@T.inline
def wait_for_turn(kernel, order, consumer, phase):
    """Have a consumer wait until the other one has started its last MMAs, or is as far ahead as staggered ones are."""
    if kernel.params.is_pingpong:
        order.wait(consumer, phase)
        phase = 1 - phase
    elif kernel.params.is_staggered:
        if consumer == 1:
            order.wait(1, phase)
            phase = 1 - phase
