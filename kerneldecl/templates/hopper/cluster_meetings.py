"""Owns when the CTAs of a GEMM kernel's cluster meet: before they load, before they send accumulators, before they end.

Knows nothing of what they send.

CTAs that share operands by multicast write to each other's stages, and so meet before they load and before they end. Those that only share
k (`meets_late`) need to know that the others have begun before they send, and receive by a barrier that counts bytes: no meeting is waited
for while DRAM idles, and none has all writes seen by the whole GPU first.
"""

from __future__ import annotations

from tvm.script import tirx as T


@T.inline
def _sync():
    T.ptx.barrier.cluster.arrive.release()
    T.ptx.barrier.cluster.wait.acquire()


@T.inline
def meet_at_start(kernel):
    """Have the threads of the CTA meet once barriers are there, and those of the cluster, or say that they are there."""
    if kernel.params.cluster_ctas > 1 and not kernel.meets_late:
        _sync()
    else:
        if kernel.meets_late and not kernel.reduces_in_stages:
            T.ptx.barrier.cluster.arrive.relaxed()
        T.cuda.cta_sync()


@T.inline
def meet_before_sending(kernel):
    """Have the cluster meet where CTAs have not done so before they loaded, or still have stages where accumulators go."""
    if kernel.meets_late:
        if kernel.reduces_in_stages:
            # What stages held has been read, and nothing is handed over.
            T.ptx.barrier.cluster.arrive.relaxed()
        T.ptx.barrier.cluster.wait.acquire()
    elif kernel.reduces_in_stages:
        _sync()


@T.inline
def meet_as_producer(kernel):
    """Have the producer warpgroup come to that meeting once it has loaded everything."""
    if kernel.reduces_in_stages or kernel.meets_late:
        # All lanes arrive at once: the cluster may meet again, and a lane that is late for this meeting must not count for that.
        T.cuda.warp_sync()
        meet_before_sending(kernel)


@T.inline
def leave(kernel):
    """Have the cluster meet before its CTAs end: what another one sends has come, or goes to a CTA that is still there."""
    if kernel.params.cluster_ctas > 1 and not kernel.meets_late:
        # The producer warp may come here in parts, so the barrier is not the aligned one.
        _sync()
