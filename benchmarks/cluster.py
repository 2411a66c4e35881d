"""Owns the measurement of tuning on a cluster: the same operators on one worker with a GPU, then on all of them, whole processes.

Knows nothing of how kernels are compiled or measured. Every worker has a GPU of its own and as many cores as the others; scheduler and
build have cores of theirs. Each build is the real command in an empty workspace.

    python benchmarks/cluster.py [--gpus 2] [--cores 15] [--seed 1] [--count 40]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench_support.random_entries import DRAWN, drawn, toml_of
from bench_support.table import machine, show_machine, write_json

import kerneldecl

START_SECS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune operators drawn at random on a Dask cluster of one GPU and of several.")
    parser.add_argument("--gpus", type=int, default=2, help="workers, each with a GPU")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)) // 2 - 1, help="cores of a worker")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="operators")
    parser.add_argument("--arch", default="h200", help="an arch of this machine's GPUs")
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    about = machine()
    show_machine(about)
    cores = sorted(os.sched_getaffinity(0))
    if given.gpus * given.cores >= len(cores):
        parser.error(f"{given.gpus} workers of {given.cores} cores leave none of {len(cores)} to the build")
    operators = drawn(given.seed, given.count, DRAWN, "cuda")
    declared = toml_of(operators, given.arch, given.top_k)
    shares = [cores[at * given.cores : (at + 1) * given.cores] for at in range(given.gpus)]
    rest = cores[given.gpus * given.cores :]
    took = {count: _tuned(declared, shares[:count], rest) for count in dict.fromkeys((1, given.gpus))}
    for count, secs in took.items():
        print(f"{count} of {given.gpus} GPUs, {given.cores} cores each: {len(operators)} operators in {secs:.1f} s", flush=True)
    print(f"{took[1] / took[given.gpus]:.2f} times as fast with {given.gpus} GPUs")
    write_json(given.json, about, {"took": {str(count): secs for count, secs in took.items()}})


def _tuned(declared: str, shares: Sequence[Sequence[int]], rest: Sequence[int]) -> float:
    """Return the seconds of a build on workers with these cores, without their start."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder, _cluster(Path(folder), shares, rest) as address:
        root = Path(folder, "workspace")
        root.mkdir()
        (root / "workloads.toml").write_text(declared, encoding="utf-8")
        began = time.perf_counter()
        command = [sys.executable, "-m", "kerneldecl", "build", "--scheduler", address, "--require-measured"]
        done = subprocess.run(_on(rest, command), cwd=root, env=_environment(), capture_output=True, text=True, check=False)
        secs = time.perf_counter() - began
        if done.returncode:
            sys.exit(f"the build ended with {done.returncode}: {done.stdout}{done.stderr}")
        print(f"  {done.stderr.strip().splitlines()[-1]}", flush=True)
        return secs


@contextlib.contextmanager
def _cluster(folder: Path, shares: Sequence[Sequence[int]], rest: Sequence[int]) -> Iterator[str]:
    """Provide the address of a scheduler whose workers have come."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    scheduler = ["-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--no-dashboard"]
    commands = [(_on(rest, [sys.executable, *scheduler]), "")]
    for at, share in enumerate(shares):
        worker = ["-m", "distributed.cli.dask_worker", address, "--nthreads", str(len(share)), "--resources", "GPU=1", "--no-dashboard"]
        commands.append((_on(share, [sys.executable, *worker, "--local-directory", str(folder / f"worker{at}")]), str(at)))
    with contextlib.ExitStack() as held:
        for command, gpu in commands:
            visible = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
            log = held.enter_context((folder / f"log{gpu}").open("w", encoding="utf-8"))
            process = subprocess.Popen(command, env=_environment() | visible, stdout=log, stderr=log)
            held.callback(process.wait)
            held.callback(process.terminate)
        _wait_for(address, len(shares))
        yield address


def _wait_for(address: str, workers: int) -> None:
    from distributed import Client

    with Client(address, timeout=START_SECS) as client:
        client.wait_for_workers(workers, timeout=START_SECS)


def _on(cores: Sequence[int], command: Sequence[str]) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(kerneldecl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


if __name__ == "__main__":
    main()
