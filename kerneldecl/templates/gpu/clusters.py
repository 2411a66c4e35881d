"""Owns how the thread blocks of a cluster wait for each other.

Knows nothing of what they share.
"""

from __future__ import annotations

from tvm.script import tirx as T


@T.inline
def meet(cluster):
    """Have all threads of a thread block, or of all of its cluster, wait for each other."""
    if cluster == 1:
        T.cuda.cta_sync()
    else:
        # Lanes, or a warp that is a producer, may come here apart, so the barrier is not the aligned one.
        T.ptx.barrier.cluster.arrive.release()
        T.ptx.barrier.cluster.wait.acquire()
