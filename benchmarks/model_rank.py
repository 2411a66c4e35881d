"""Owns the comparison of our policies' order of GEMM candidates with that of NVIDIA's nvMatmulHeuristics, on the committed records.

Knows nothing of how either model works. Needs no GPU:

    pip install 'kerneldecl[benchmarks-heuristics]' && python benchmarks/model_rank.py

Both order the same candidates: those of `wgmma_matmul` that the records hold times of. NVIDIA's model gets of each what it has
parameters for: tiles, cluster, split-K and stages, with operands swapped where the candidate swaps them; a persistent or
stream-K schedule and the order of tiles it does not know. Ties keep our order, which favours it.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.model import Candidate
from kerneldecl.planning.workspace import open_workspace
from kerneldecl.tuning.model_rank import COUNTS, ModelRank, TimedEarlier, geometric_mean, rank_of_order

ROOT = Path(__file__).parents[1]
TEMPLATE = "wgmma_matmul"
GPUS = {"h200": "H200_SXM", "h100-sxm": "H100_SXM", "h100-pcie": "H100_PCIE", "h100-nvl": "H100_NVL"}
"""Our names of targets with wgmma, and NVIDIA's."""
K_TILE_BYTES = 128
"""Extent of a k-tile: one swizzle atom."""


class Heuristics:
    """NVIDIA's model of one GPU."""

    def __init__(self, gpu: str) -> None:
        from importlib import import_module

        self._theirs = theirs = import_module("nvMatmulHeuristics.nvMatmulHeuristics")
        known = theirs.NvMatmulHeuristicsNvidiaGpu[gpu]
        self._model = theirs.NvMatmulHeuristicsInterfaceEx(backend=theirs.NvMatmulHeuristicsTarget.CUTLASS3, gpu=known)

    def predicted_secs(self, attrs: Mapping[str, Any], params: Mapping[str, Any]) -> float:
        """Return what it expects of a candidate of a float16 GEMM."""
        m, n, layout = attrs["m"], attrs["n"], attrs["layout"]
        if params["swap_ab"]:  # C^T = B^T A^T: operands change places, and each is transposed
            m, n, layout = n, m, "".join("t" if each == "n" else "n" for each in reversed(layout))
        problem = self._model.makeNvMatmulHeuristicsProblem(m, n, attrs["k"], self._layout(layout), max(1, attrs["batch"]))
        config = self._model.nvmmhKernelConfiguration()
        block_m, block_n = params["block_m"], params["block_n"]
        k_tile = K_TILE_BYTES // 2
        config.cta[:], config.warp[:], config.instr[:] = (block_m, block_n, k_tile), (64, block_n, k_tile), (64, 8, 16)
        config.splitK, config.loadStages = params["split_k"], params["stages"]
        config.gridSwizzle, config.ctaOrder = max(1, params["raster_group"]), 0
        config.cluster[:] = (params["cluster_m"], params["cluster_n"])
        precision = "HHH" if attrs["accum_dtype"] == "float16" else "HSH"
        model = self._model
        assert model.loadInternalDiscoverySet(problem.matmulLayout, precision), f"no profile of {precision}"
        # By the C interface: the package's own estimateRuntime calls a method that is not there (0.1.0.27).
        given = (precision.encode(), ctypes.c_int(model.target), ctypes.byref(problem), ctypes.byref(config), model.hardware_descriptor)
        return float(model.nvMatmulHeuristicsEstimateRuntime(model.handle, *given))

    def _layout(self, layout: str) -> Any:
        return self._theirs.NvMatmulHeuristicsMatmulLayout[f"{layout.upper()}_ROW_MAJOR"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200", choices=GPUS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    described, heuristics = machine(), Heuristics(GPUS[options.target])
    rows, ours, theirs = [], [], []
    for entry, attrs, order, secs in _gemms(options.target):
        expected = {each: heuristics.predicted_secs(attrs, dict(each.params)) for each in order}
        own, other = rank_of_order("ours", order, secs), rank_of_order("NVIDIA's", sorted(order, key=expected.__getitem__), secs)
        assert own is not None
        assert other is not None
        ours.append(own)
        theirs.append(other)
        rows.append({"entry": entry, "timed": own.timed, **_shares("ours", own), **_shares("NVIDIA's", other)})
    means = {f"{name} {count}": _mean(ranks, count) for name, ranks in (("ours", ours), ("NVIDIA's", theirs)) for count in COUNTS}
    show_machine(described)
    show("Place of the fastest candidate in each model's order; the fastest's time by that of the first's and of the best of five", rows)
    show(
        "Geometric means: the fastest's time by that of the best of the first k", [{"k": count, **_both(means, count)} for count in COUNTS]
    )
    write_json(options.json, described, {"entries": rows, "means": means})


def _gemms(target: str) -> Iterator[tuple[str, dict[str, Any], list[Candidate], dict[Candidate, float]]]:
    """Yield each float16 GEMM of the records with its attributes, its proposals and the times of them."""
    from kerneldecl.stages.session import make_plan

    workspace = open_workspace(ROOT)
    store = workspace.store
    earlier = TimedEarlier(store.all("tune", is_local=False), store.all("propose", is_local=False))
    for entry in make_plan(workspace).entries:
        if entry.workload.target != target or entry.workload.rule != "matmul" or not entry.groups:
            continue
        secs = {each: value for each, value in earlier.of(entry.action("tune").manifest).secs.items() if each.template == TEMPLATE}
        if secs:
            order = [each.candidate for each in entry.groups[0].proposals if each.candidate in secs]
            yield entry.entry, dict(entry.workload.attrs), order, secs


def _shares(name: str, rank: ModelRank) -> dict[str, Any]:
    return {f"{name}: rank": rank.rank, f"{name}: first": rank.share(1), f"{name}: 5": rank.share(5)}


def _mean(ranks: list[ModelRank], count: int) -> float:
    return geometric_mean([rank.share(count) for rank in ranks])


def _both(means: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: means[f"{name} {count}"] for name in ("ours", "NVIDIA's")}


if __name__ == "__main__":
    main()
