"""Owns when the CTAs of a GEMM kernel's cluster meet: before they load, before they send accumulators, before they end.

Knows nothing of what they send.

CTAs that share operands by multicast write to each other's stages, and so meet before they load and before they end. Those that share k
need to know that the others have begun before they send, and receive by a barrier that counts bytes: no meeting is waited for while they
could load, and none has all writes seen by the whole GPU first.
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
    if kernel.params.cluster_ctas > 1 and not kernel.sends_partials:
        _sync()
    else:
        if kernel.sends_partials and not kernel.reduces_in_stages:
            T.ptx.barrier.cluster.arrive.relaxed()
        T.cuda.cta_sync()


@T.inline
def meet_before_sending(kernel):
    """Wait until all CTAs of the cluster have begun, and until none has stages where accumulators go."""
    if kernel.reduces_in_stages:
        # What stages held has been read, and nothing is handed over.
        T.ptx.barrier.cluster.arrive.relaxed()
    T.ptx.barrier.cluster.wait.acquire()


@T.inline
def meet_as_producer(kernel):
    """Have the producer warpgroup come to that meeting once it has loaded everything."""
    if kernel.sends_partials:
        T.cuda.warp_sync()
        meet_before_sending(kernel)


@T.inline
def done_with_stages(kernel):
    """Have a consumer with a workspace come to the cluster's last meeting, so that what it then stores in global memory delays nobody."""
    if kernel.params.workspace == 1 and kernel.params.cluster_ctas > 1:
        T.ptx.barrier.cluster.arrive.release()


@T.inline
def leave(kernel, is_producer):
    """Have the cluster meet before its CTAs end, where these write to each other's stages.

    With split-K in a cluster a CTA waits for all that it receives, and has nothing that others read.
    """
    if kernel.params.cluster_ctas > 1 and not kernel.sends_partials:
        # The producer warp may come here in parts, so the barrier is not the aligned one.
        if kernel.params.workspace == 1:
            if is_producer:
                T.ptx.barrier.cluster.arrive.release()
            T.ptx.barrier.cluster.wait.acquire()
        else:
            _sync()
