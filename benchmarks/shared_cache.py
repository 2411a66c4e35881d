"""Owns the measurement of a second machine: a build that finds everything in a shared cache and nothing else, whole processes.

Knows nothing of how fast kernels are. A first workspace is built by the real flow, with workers that answer at once and objects that a
compiler made, and shares what it finds. Then the real command builds the same declarations in an empty folder, and links with the real
linker. Its artifact must be the same, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_support.many_entries import InstantRunner, declared, make_workspace, shapes_of, tables
from bench_support.nginx import serving_nginx
from bench_support.table import machine, show_machine

import kerneldecl
from kerneldecl.store.keys import symbol

LIMIT_SECS = {1_000: 4.0}
_PLACE = b"kd_00000000000000000000"


class LinkableRunner(InstantRunner):
    """Answers with object files that a linker takes: one that a compiler made, with the symbol of each request."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "kernel.c"), Path(folder, "kernel.o")
            text = f"int {_PLACE.decode()}(float *x, long n) {{ for (long i = 0; i < n; i++) x[i] = x[i] > 0 ? x[i] : 0; return 0; }}"
            source.write_text(text, encoding="utf-8")
            subprocess.run(["cc", "-O3", "-fPIC", "-c", str(source), "-o", str(made)], check=True)
            self._object = made.read_bytes()

    def object_of(self, request: Mapping[str, Any]) -> bytes:
        return self._object.replace(_PLACE, symbol(request["spec"]["computation"]).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    show_machine(machine())
    with tempfile.TemporaryDirectory() as folder, serving_nginx(Path(folder, "nginx")) as url:
        Path(folder).chmod(0o755)
        for name, where in {"nginx": url, "folder": f"{folder}/nginx/served"}.items():
            text = declared(tables(shapes_of(arguments.entries))).replace(
                "\n[target", f'\n[cache]\nurl = "{where}"\nmode = "MODE"\n\n[target', 1
            )
            first = Path(folder, f"{name}-first")
            make_workspace(first, text.replace("MODE", "read-write"), None, LinkableRunner)
            reference = _linked_here(first)
            for run in range(arguments.runs):
                second = Path(folder, f"{name}-{run}")
                _declare(second, first, text.replace("MODE", "read"))
                secs, said = _built(second)
                same = "same artifact" if _files(second) == reference else "ANOTHER ARTIFACT"
                print(f"{name:<8} {arguments.entries} entries: {secs:.2f} s, {same}; {said}")
                if same != "same artifact" or secs > LIMIT_SECS.get(arguments.entries, float("inf")):
                    sys.exit(1)


def _declare(root: Path, like: Path, text: str) -> None:
    (root / "policies").mkdir(parents=True)
    (root / "archs").mkdir()
    for name in ("policies/first.py", "archs/listed.toml"):
        (root / name).write_bytes((like / name).read_bytes())
    (root / "workloads.toml").write_text(text, encoding="utf-8")


def _linked_here(first: Path) -> dict[str, bytes]:
    """Return the files of the first workspace's artifact, linked again as the command links it."""
    for path in (first / "dist").rglob("*.so"):
        path.unlink()
    _built(first)
    return _files(first)


def _built(root: Path) -> tuple[float, str]:
    path = os.pathsep.join([str(Path(kerneldecl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "kerneldecl", "build"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"the build ended with {done.returncode}: {done.stdout}{done.stderr}")
    return time.perf_counter() - began, done.stderr.strip().splitlines()[-1]


def _files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted((root / "dist").rglob("*")) if path.is_file()}


if __name__ == "__main__":
    main()
