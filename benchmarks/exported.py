"""Owns the comparison of exported CUDA headers with the artifact that holds the same kernels: same bits, same time.

Knows nothing of how either is made. Needs the GPU of the entries' arch, torch and nvcc:

    kerneldecl build '*@h200' && python benchmarks/exported.py 'softmax@h200' 'gemv_i4@h200'
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_support.exported import loaded, shared_library
from bench_support.gpu.timing import Replay, copies_of, flusher
from bench_support.table import quantiles

import kerneldecl
from kerneldecl.artifact.manifest import artifact_folder
from kerneldecl.cli.export import exported
from kerneldecl.declare.select import select
from kerneldecl.planning.workspace import open_workspace
from kerneldecl.stages.session import make_plan

ROUNDS = 15
_ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="+")
    workspace = open_workspace(_ROOT)
    chosen = {workload.entry for workload in select(workspace.declaration.workloads, tuple(parser.parse_args().patterns))}
    wrong = 0
    print(f"{'entry':<56} {'record':>9} {'artifact':>9} {'header':>9}  header / artifact")
    with tempfile.TemporaryDirectory() as folder:
        for entry in make_plan(workspace).entries:
            if entry.entry in chosen:
                wrong += not _compared(workspace, entry, Path(folder))
    return 1 if wrong else 0


def _compared(workspace: Any, entry: Any, folder: Path) -> bool:
    """Print an entry's line; say whether the two kernels have written the same bits."""
    name, declared = "exported", workspace.declaration
    header = folder / f"{entry.tuned.symbol}.cuh"
    header.write_text(exported(workspace, entry, "cuda", name)["text"], encoding="utf-8")
    run, workspace_bytes = loaded(shared_library(header, name))
    kernels = kerneldecl.load(artifact_folder(workspace.root, declared.artifact, declared.version, entry.workload.target))
    kernel, scratch = kernels[entry.workload.name], torch.empty(max(1, workspace_bytes), dtype=torch.uint8, device="cuda")
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [_arrays(entry.lowered.signature) for _ in range(copies_of(int(entry.lowered.least_bytes), l2_bytes))]

    def ours(at: int) -> None:
        kernel(*sets[at])

    def theirs(at: int) -> None:
        error = run(torch.cuda.current_stream().cuda_stream, [each.data_ptr() for each in sets[at]], scratch.data_ptr())
        assert error == 0, f"{entry.entry}: CUDA's error {error}"

    results = []
    for call in (ours, theirs):
        sets[0][-1].fill_(0)
        call(0)
        torch.cuda.synchronize()
        results.append(sets[0][-1].clone())
    same = torch.equal(results[0].view(torch.uint8), results[1].view(torch.uint8)) and bool(results[0].view(torch.uint8).any())
    replays = [Replay(call, len(sets), flusher(l2_bytes)) for call in (ours, theirs)]
    rounds = [[replay.secs() for replay in replays] for _ in range(ROUNDS)]
    medians = [quantiles([each[at] for each in rounds])[1] for at in range(2)]
    ratio = quantiles([after / before for before, after in rounds])[1]
    figures = " ".join(f"{secs * 1e6:>8.2f}u" for secs in (entry.tuned.run_secs, *medians))
    print(f"{entry.entry:<56} {figures}  {ratio:.3f}{'' if same else '  OTHER BITS'}", flush=True)
    return same


def _arrays(signature: Any) -> list[Any]:
    """Return random inputs and an empty output of an entry, as torch's tensors."""
    made = []
    for each in (*signature["inputs"], *signature["outputs"]):
        dtype = getattr(torch, each["dtype"])
        drawn = torch.rand(each["shape"], device="cuda") - 0.5 if dtype.is_floating_point else None
        made.append(drawn.to(dtype) if drawn is not None else torch.randint(0, 128, each["shape"], device="cuda").to(dtype))
    return made


if __name__ == "__main__":
    sys.exit(main())
