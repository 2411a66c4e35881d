"""Owns how TVM's pool of threads, on which parallel kernels run, is configured: how many threads, and that none is bound to a core.

Knows nothing of kernels. TVM reads both from the environment when a thread first calls a parallel kernel.
"""

from __future__ import annotations

import os


def set_threads(count: int) -> None:
    """Have parallel kernels run on so many threads, unless TVM_NUM_THREADS says otherwise or one has run already.

    TVM's own choice is half of the logical cores, which is one where a machine has two.
    """
    os.environ.setdefault("TVM_NUM_THREADS", str(count))


def leave_unbound() -> None:
    """Have the system choose the cores of a pool's threads, unless TVM_BIND_THREADS says otherwise or a kernel has run already.

    TVM's own choice binds them to the second core and those that follow, but not the thread that calls, which takes part: where that
    wakes up on a core of theirs, two threads share it while another core is idle, and a kernel takes twice as long. It also lets
    the calling thread onto cores that its process was kept from, and binds the pools of all calling threads to the same cores.
    """
    os.environ.setdefault("TVM_BIND_THREADS", "0")
