"""Owns the timing of an artifact's kernels again, here and now, beside the times that were recorded.

Knows nothing of plans: an artifact's manifest describes it, its records or the package's statement have the times.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kerneldecl.artifact.load import checked_artifact
from kerneldecl.cli.verify import LIMIT_SECS, SEED, references_of
from kerneldecl.compare.verdict import BUDGET, Comparison, Measured, compare
from kerneldecl.errors import VerificationError
from kerneldecl.hardware import host
from kerneldecl.runners.local import LocalRunner
from kerneldecl.runners.process import Answer
from kerneldecl.runners.verdict import judged
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.timing import PROTOCOLS, Protocol, Timings, median, raced
from kerneldecl.tuning.race import budget_of, calls_in

_SAMPLES, _MOST_SECS = 15, 2.0
"""Samples of a kernel under each protocol, fewer of one for which they would take longer than so many seconds."""
_LEAST_SAMPLES = 3


def bench_artifact(folder: Path, root: Path, recorded: Mapping[str, Measured]) -> tuple[list[Comparison], dict[str, Any]]:
    """Verify and time every kernel of an artifact under all protocols of its device; compare with the recorded times.

    Return the comparisons and what is to be said of the device. Raise VerificationError for a kernel that is wrong here, ToolchainError
    where its GPU is not here.
    """
    folder, manifest = checked_artifact(folder.resolve())
    arch, target = manifest["arch"], manifest["target"]
    library = str((folder / manifest["library"]).resolve())
    cores = arch.get("cpu", {"cores": len(os.sched_getaffinity(0))})["cores"]
    found: dict[str, Measured] = {}
    with LocalRunner(1, cores) as runner, scratch_folder() as scratch:
        device = {"device": arch["kind"], "model": arch["model"], "library": library}
        for entry, reference in zip(manifest["entries"], references_of(folder, manifest, root, scratch, runner), strict=True):
            name = f"{entry['name']}@{target}"
            before = recorded.get(name)
            timing = before.timing if before and before.timing else raced(arch["kind"], "cool")[0]
            found[name] = _timed(entry, device, reference, timing, runner)
            if before:  # one kernel on both sides, whose code is not new
                found[name] = replace(found[name], key=before.key, winner=before.winner, code=before.code)
    here = arch["model"] if arch["kind"] == "cuda" else host.detect().model  # the runner has found that GPU
    return compare(recorded, found, BUDGET), {"recorded_on": arch["model"], "timed_on": here}


def _timed(entry: Mapping[str, Any], device: Mapping[str, str], reference: Answer, timing: str, runner: LocalRunner) -> Measured:
    if "failure" in reference:
        raise VerificationError(f"{entry['name']}: there is neither its rule nor its computation: {reference['failure']}")
    spec = {**reference, "seed": SEED}
    kernel = {**device, "spec": spec, "symbol": entry["symbol"]}
    answer = runner.measure({"action": "verify", **kernel}, LIMIT_SECS)
    if failure := judged(answer, entry["verdict"]["tolerance"]):
        raise VerificationError(f"{entry['name']}: {failure}")
    kind = device["device"]
    taken = {protocol: _samples(kernel, protocol, kind, answer["secs"], runner) for protocol in PROTOCOLS[kind]}
    protocols = raced(kind, timing)
    # A timing of two protocols is their geometric mean, sample by sample.
    samples = tuple(_geometric(pair) for pair in zip(*(taken[protocol] for protocol in protocols), strict=False))
    others: Timings = tuple((protocol, values) for protocol, values in taken.items() if protocols != (protocol,))
    return Measured(entry["name"], "", "", median(samples), is_verified=True, samples=samples, timing=timing, timings=others)


def _samples(kernel: Mapping[str, Any], protocol: Protocol, kind: str, first_secs: float, runner: LocalRunner) -> tuple[float, ...]:
    budget = budget_of(kind, protocol if protocol != "chained" else "cool")
    calls = calls_in(budget.sample_secs, first_secs)
    count = max(_LEAST_SAMPLES, min(_SAMPLES, int(_MOST_SECS / max(calls * first_secs, 1e-6))))
    answer = runner.measure({"action": "sample", **kernel, "calls": calls, "samples": count, "protocol": protocol}, LIMIT_SECS)
    if "failure" in answer:
        raise VerificationError(f"{kernel['symbol']} cannot be timed ({protocol}): {answer['failure']}")
    return tuple(float(secs) for secs in answer["samples"])


def _geometric(values: tuple[float, ...]) -> float:
    product = 1.0
    for value in values:
        product *= value
    return float(product ** (1 / len(values)))
