"""Owns the question what rows at run time cost: a kernel that takes any number of them beside one tuned for each number.

Knows nothing of how either is made. Both are built as a user builds them, and timed in turns by the workers that tune.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.plugins.find import STANDARD
from kerneldecl.runners.local import LocalRunner
from kerneldecl.timing import median, raced
from kerneldecl.tuning.race import budget_of, calls_in

DECLARED = Path(__file__).parent / "rows" / "workloads.toml"
TITLE = "Rows at run time (us of a call; static / any: above 1, the kernel of any number of rows is the faster one)"
LIMIT_SECS = 120.0
SEED = 22
Row = dict[str, Any]


def built(folder: Path, target: str, only: str, declared: Path) -> dict[str, Any]:
    """Build the declared entries of a target whose names begin so, and return its artifact's manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    head, *tables = declared.read_text(encoding="utf-8").split("[[workload]]")
    kept = [table for table in tables if table.lstrip().startswith(f'name = "{only}')]
    (folder / "workloads.toml").write_text("[[workload]]".join([head, *kept]), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "kerneldecl", "build", f"*@{target}"], cwd=folder, check=False)
    (found,) = folder.glob(f"dist/*/{target}/manifest.json")
    return {**json.loads(found.read_text()), "folder": str(found.parent)}


def pairs(manifest: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], int]]:
    """Yield each kernel of any number of rows with each entry that computes the same for one number, and that number."""
    for family in manifest["rows"]:
        (tuned,) = (entry["rows"] for entry in manifest["entries"] if entry["name"] == family["entries"][-1])
        for entry in manifest["entries"]:
            if "rows" in entry or entry["rule"] != family["rule"]:
                continue
            value, own = entry["attrs"][tuned["attribute"]], family["attrs"][tuned["attribute"]]
            rows = value if tuned["place"] < 0 else value[tuned["place"]]
            now = own if tuned["place"] < 0 else own[tuned["place"]]
            same = {
                **entry["attrs"],
                tuned["attribute"]: own if tuned["place"] < 0 else [now if at == tuned["place"] else each for at, each in enumerate(value)],
            }
            if same == family["attrs"]:
                yield family, entry, rows


def compared(manifest: Mapping[str, Any], family: Mapping[str, Any], entry: Mapping[str, Any], runner: LocalRunner, rounds: int) -> Row:
    """Verify and time a kernel of any number of rows beside one that is tuned for the number."""
    kind = manifest["arch"]["kind"]
    (protocol, *_) = raced(kind, "cool")
    spec = {"root": str(STANDARD), "rule": entry["rule"], "attrs": entry["attrs"], "seed": SEED}
    where = {
        "device": kind,
        "model": manifest["arch"]["model"],
        "spec": spec,
        "library": str(Path(manifest["folder"]) / manifest["library"]),
    }
    runner.measure({"action": "prepare", "device": kind, "model": manifest["arch"]["model"], "spec": spec}, LIMIT_SECS)
    first: dict[str, float] = {}
    for name, symbol in (("any", family["symbol"]), ("static", entry["symbol"])):
        answer = runner.measure({"action": "verify", **where, "symbol": symbol}, LIMIT_SECS)
        if "secs" not in answer or answer["error"] > entry["verdict"]["tolerance"]:
            return {"failure": f"{name}: {answer}"}
        first[name] = answer["secs"]
    samples: dict[str, list[float]] = {"any": [], "static": []}
    for at in range(rounds):
        for name, symbol in (("any", family["symbol"]), ("static", entry["symbol"]))[:: 1 if at % 2 else -1]:
            calls = calls_in(budget_of(kind, "cool").sample_secs, first[name])
            asked = {"action": "sample", "calls": calls, "samples": 1, "protocol": protocol}
            samples[name] += runner.measure({**asked, **where, "symbol": symbol}, LIMIT_SECS)["samples"]
    found = {name: median(each) for name, each in samples.items()}
    return {"static us": found["static"] * 1e6, "any us": found["any"] * 1e6, "static / any": found["static"] / found["any"]}


def measured(manifest: Mapping[str, Any], rounds: int) -> list[Row]:
    """Return a row for each number of rows that both kinds of kernels take."""
    rows: list[Row] = []
    with LocalRunner(1, len(os.sched_getaffinity(0))) as runner:
        for family, entry, count in sorted(pairs(manifest), key=lambda pair: (pair[0]["name"], pair[2])):
            tuned = next(each["tuned"] for each in family["table"] if count <= each["upto"])
            names = {"kernel": family["name"], "rows": count, "its kernel is tuned for": tuned}
            rows.append({**names, **compared(manifest, family, entry, runner, rounds), "static kernel": entry["winner"]["template"]})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def summary(rows: Sequence[Row]) -> Row:
    """Return the least and the mean ratio at tuned numbers and at others."""
    found: Row = {}
    for where, is_tuned in (("tuned", True), ("between", False)):
        ratios = [
            row["static / any"] for row in rows if "static / any" in row and (row["rows"] == row["its kernel is tuned for"]) == is_tuned
        ]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            found |= {f"{where}, least": min(ratios), f"{where}, mean": mean}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare kernels of any number of rows with kernels tuned for each number.")
    parser.add_argument("--target", default="h200", help="target of benchmarks/rows/workloads.toml")
    parser.add_argument("--declared", type=Path, default=DECLARED, help="workspace to declare")
    parser.add_argument("--only", default="", help="how names of the entries begin that are built")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="workspace to keep")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        manifest = built((given.folder or Path(scratch)).resolve(), given.target, given.only, given.declared)
        for family in manifest["rows"]:
            print(family["name"], [(each["upto"], each["tuned"]) for each in family["table"]], flush=True)
        rows = measured(manifest, given.rounds)
    about = machine()
    show_machine(about)
    show(TITLE, rows)
    show("Ratios", [summary(rows)])
    write_json(given.json, about, {"rows": rows})


if __name__ == "__main__":
    main()
