"""Owns records and locks of a test's workspace that tell of slower kernels than were measured.

Knows nothing of what is made of them.
"""

from __future__ import annotations

import json

from kerneldecl.store.local import LocalStore, Record
from kerneldecl.store.record_text import record_bytes
from support.spaces import Space


def slow_down(space: Space, entry: str, factor: float, isolated: float = 1.0) -> None:
    """Rewrite the record of an entry as if its winner took longer, and the lock with it; and by another factor where it is isolated."""
    lock = space.read("workloads.lock")
    block = next(block for block in lock.split("\n\n") if f'name = "{entry}"' in block)
    key = block.partition('key = "')[2].partition('"')[0]
    store = LocalStore(space.root / "cache")
    record = store.read("tune", key, is_local=False)
    assert isinstance(record, Record)
    result = json.loads(json.dumps(dict(record.result)))
    old_us = result["run_secs"] * 1e6
    result["run_secs"] = float(f"{result['run_secs'] * factor:.4g}")
    result["trials"][0]["samples"] = [secs * factor for secs in result["trials"][0]["samples"]]
    timings = result["trials"][0]["timings"]
    timings["isolated"] = [secs * isolated for secs in timings["isolated"]]
    store.record_path("tune", key, is_local=False).write_bytes(record_bytes("tune", record.manifest, result))
    changed = block.replace(f"time_us = {old_us:.4g}", f"time_us = {result['run_secs'] * 1e6:.4g}")
    assert changed != block
    space.write({"workloads.lock": lock.replace(block, changed)})
