"""Owns the sweep over ONNX's own node tests: each goes through extract, build and compile on this CPU and is compared with what it expects.

Knows nothing of how one is compiled. `PYTHONPATH=tests:. python -m support.onnx_sweep` prints the table, after an hour on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from support.onnx_nodes import cases
from support.repository import REPOSITORY

CHUNK = 80
"""Cases that share a workspace: a process and a command take seconds, whatever they do."""
LIMIT_SECS = 3600
OUTCOMES = ("right", "refused", "wrong", "failed", "crash")
ORDINARY = {("extract", 2), ("build", 1)}
"""Ends of commands where a model still runs: it has nothing to tune, or some of its kernels failed."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    name: str
    outcome: str
    """One of OUTCOMES: right, refused in a sentence, wrong outputs, an error that is no refusal, a process that died."""
    why: str
    tvm_reads: bool
    """It is no expansion of another case, and TVM's own importer reads it."""


@dataclass(frozen=True)
class Found:
    """Verdicts of some cases, and the exit codes of commands that were not 0, by command."""

    verdicts: tuple[Verdict, ...]
    ends: Counter[tuple[str, int]]


def sweep(names: Sequence[str], folder: Path, jobs: int, written: Path | None = None) -> Found:
    """Return what becomes of the cases, `jobs` chunks of them at a time; what is known is written after each chunk."""
    # Neighbours by name compute alike: what they share is tuned once.
    chunks = [names[at : at + CHUNK] for at in range(0, len(names), CHUNK)]
    start = time.monotonic()
    done: list[Found] = []

    def one(at: int) -> None:
        done.append(_chunk(chunks[at], folder / str(at)))
        if written:
            verdicts = [vars(each) for each in _joined(done).verdicts]
            written.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
        counts = Counter(each.outcome for found in done for each in found.verdicts)
        shown = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        print(f"{time.monotonic() - start:6.0f} s, {sum(counts.values())} of {len(names)}: {shown}", file=sys.stderr, flush=True)  # noqa: T201

    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(one, range(len(chunks))))
    return _joined(done)


def _chunk(names: Sequence[str], folder: Path) -> Found:
    """Return the verdicts of cases; where something ends that is no case's own, those of each half."""
    folder.mkdir(parents=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        path = os.pathsep.join(filter(None, (str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", ""))))
        command = [sys.executable, "-m", "support.onnx_chunk", str(folder), *names]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False, timeout=LIMIT_SECS)
    lines = [json.loads(line) for line in (folder / "verdicts.jsonl").read_text(encoding="utf-8").splitlines()]
    found = _found(names, lines)
    is_shared = any(verdict.outcome in {"crash", "failed"} for verdict in found.verdicts)
    if len(names) == 1 or not is_shared:
        return found
    half = len(names) // 2
    return _joined([_chunk(part, folder / side) for part, side in ((names[:half], "a"), (names[half:], "b"))])


def _found(names: Sequence[str], lines: Iterable[dict[str, Any]]) -> Found:
    said: dict[str, dict[str, Any]] = {name: {"outcome": "crash", "why": "its process died", "tvm reads": False} for name in names}
    ends: Counter[tuple[str, int]] = Counter()
    for line in lines:
        if "name" in line:
            said[line["name"]].update(line)
        else:
            ends[line["command"], line["code"]] += 1
    return Found(tuple(Verdict(name, each["outcome"], each["why"], each["tvm reads"]) for name, each in said.items()), ends)


def _joined(found: Iterable[Found]) -> Found:
    parts = list(found)
    return Found(tuple(verdict for each in parts for verdict in each.verdicts), sum((each.ends for each in parts), Counter()))


def table(found: Found) -> str:
    """Return the figures: outcomes of all cases and of those that TVM reads, then the reasons of all that are not right."""
    groups = {
        "all": found.verdicts,
        "read by TVM, no expansions": [each for each in found.verdicts if each.tvm_reads],
    }
    lines = [f"| {'cases':<26} | {'number':>6} | " + " | ".join(f"{outcome:>7}" for outcome in OUTCOMES) + " | share right |"]
    lines.append("|" + "---|" * (len(OUTCOMES) + 3))
    for group, verdicts in groups.items():
        counts = Counter(each.outcome for each in verdicts)
        share = counts["right"] / len(verdicts) if verdicts else 0.0
        lines.append(
            f"| {group:<26} | {len(verdicts):>6} | " + " | ".join(f"{counts[each]:>7}" for each in OUTCOMES) + f" | {share:11.3f} |"
        )
    lines.append(
        "commands that ended otherwise: " + (", ".join(f"{c} with {code}: {n}" for (c, code), n in sorted(found.ends.items())) or "none")
    )
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in found.verdicts:
        if each.outcome != "right":
            reasons.setdefault((each.outcome, each.why), []).append(each.name)
    for (outcome, why), names in sorted(reasons.items(), key=lambda item: (OUTCOMES.index(item[0][0]), -len(item[1]))):
        lines.append(f"{len(names):>4} {outcome}: {why}\n     " + " ".join(names))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names of cases, such as 'test_cast*'; repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="chunks at a time, each of one process (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the verdicts are written, after each chunk")
    given = parser.parse_args()
    names = [name for name in sorted(cases()) if not given.only or any(fnmatch(name, pattern) for pattern in given.only)]
    with tempfile.TemporaryDirectory(prefix="kerneldecl-onnx-") as folder:
        found = sweep(names, Path(folder), given.jobs, given.json)
    print(table(found))  # noqa: T201
    return int(any(each.outcome not in {"right", "refused"} for each in found.verdicts) or bool(set(found.ends) - ORDINARY))


if __name__ == "__main__":
    sys.exit(main())
