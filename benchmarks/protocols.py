"""Owns the question which timing protocol predicts networks: the sum of their kernels under each, beside the network's own time.

Knows nothing of how models are tuned or timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench_support.own_process import OwnProcess
from bench_support.table import show, show_machine, write_json
from models import arch_of, chosen, described_machine

from kerneldecl.plugins.load import load_arch

Row = dict[str, Any]
MODELS = ("resnet18.b1", "bert_base.b16.s128", "llama3_8b.block.decode2047")
TITLE = "Networks (us in a CUDA graph, steady; the sum of their kernels by that time, under each protocol)"
LIMIT_SECS = 600.0


def predictions(name: str, given: argparse.Namespace, folder: Path, l2_bytes: int) -> Row:
    """Tune a model as a user would, and return its time and the sums of its kernels' times."""
    from bench_support.models.predictions import measured, predicted, recorded
    from bench_support.models.tuning import Choice, tuned

    from kerneldecl.hardware.gpu_lock import held_gpu

    process = OwnProcess()
    row = tuned(Choice(name, given.dtype, "pt2", given.arch, given.top_k, ()), folder / name, process)
    if "failure" in row:
        return {"model": name, "failure": row["failure"]}
    library = row["libraries"]["ours"]
    try:
        with held_gpu(load_arch(folder, given.arch).model, lambda text: print(text, flush=True)):  # another model may be tuned meanwhile
            found = process.ask(measured, name, given.dtype, library, l2_bytes, limit_secs=LIMIT_SECS)
    except RuntimeError as error:
        return {"model": name, "failure": str(error)}
    finally:
        process.close()
    kernels = recorded(folder / name, Path(library[1]))
    others = {function: count for function, count in found["calls"].items() if function not in kernels}
    return {"model": name, **found, "sums": predicted(kernels, found["calls"]), "others": others, "kernels": kernels}


def table_row(row: Row) -> Row:
    if "failure" in row:
        return {"model": row["model"], "failure": row["failure"]}
    ratios = {protocol: secs / row["graph_secs"] for protocol, secs in row["sums"].items()}
    counted = sum(row["calls"].values()) - sum(row["others"].values())
    times = {"steady us": row["graph_secs"] * 1e6, "rested us": row["rested_secs"] * 1e6}
    return {"model": row["model"], **times, **ratios, "calls": counted, "without a record": sum(row["others"].values())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare networks' times on a GPU with the sums of their kernels' times by protocol.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help=f"models; default: {', '.join(MODELS)}")
    parser.add_argument("--arch", default="h200", help="arch of this GPU")
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--top-k", type=int, default=10, help="candidates that are built and timed for each function")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rows", type=Path, nargs="*", default=(), metavar="FILE", help="add networks that other runs wrote by --json")
    parser.add_argument("--folder", type=Path, help="folder of the workspaces, which a later run reuses; default: a temporary folder")
    given = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit("this needs torch: it exports the models, and captures their CUDA graphs")
    from bench_support.models.predictions import ranked

    arch = arch_of(given.arch)
    described = described_machine(arch, OwnProcess())
    show_machine(described)
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="protocols-") as folder:
        rows: list[Row] = list(_read(given.rows))
        for name in () if given.rows and not given.only else chosen(given.only or MODELS):
            rows.append(predictions(name, given, Path(folder), arch.the_gpu.l2_bytes))
            show(TITLE, [table_row(rows[-1])])
            write_json(given.json, described, {"asked": {"top_k": given.top_k, "dtype": given.dtype}, "models": rows})
    show(TITLE, [table_row(row) for row in rows])
    best = ranked([row for row in rows if "failure" not in row])
    show("Protocols, the best predictor first (off by: the mean factor between sum and network)", best)


def _read(paths: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of networks that earlier runs have written."""
    for path in paths:
        yield from json.loads(path.read_text(encoding="utf-8"))["models"]


if __name__ == "__main__":
    main()
