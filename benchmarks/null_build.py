"""Owns the measurement of builds that have nothing to do: kerneldecl beside ninja, GNU make and doit, whole processes.

Knows nothing of how fast kernels are. A null build and a plan read the files that a real build writes: records, blobs,
artifact, lock, stamp, memo. Limits are of wall time for null builds, else of processor time, and of a process's largest resident memory.

The other tools copy N files to N outputs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench_support.clones import clone, comment, forget, repository
from bench_support.many_entries import LAYOUTS, Layout, Shape, declared, make_workspace, one_table, shapes_of, tables, write_if_other
from bench_support.table import interleaved, machine, show, show_machine, write_json

import kerneldecl

LIMITS_MS = {100: 30, 1_000: 30, 10_000: 45, 100_000: 90}
EDIT_LIMIT_MS = {10_000: 300}
CLONE_LIMITS = {1_000: (400, 60), 10_000: (1500, 150)}
"""Milliseconds of processor time and MB of a plan in a fresh clone."""
WHOLE_LIMITS = {10_000: (3000, 250)}
"""The same of a build that has its records, its artifact, and nothing else."""
COMMENT_LIMITS = (1000, None)
MOST_COMPARED = 10_000
"""Entries up to which everything is measured; beyond, a null build alone."""
DEFAULT_ENTRIES = [100, 1_000, 10_000]
IMPORT_LIMIT_MS = 40
UNWANTED = ("tvm", "tvm_ffi", "numpy", "pydantic", "rich")
PATH = os.pathsep.join([str(Path(kerneldecl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}, "PYTHONPATH": PATH}
KERNELDECL = (sys.executable, "-m", "kerneldecl")


# Jobs: a command in a folder, and its output when it has nothing to do


@dataclass(frozen=True)
class Took:
    """Times of a process: wall time, and processor time, which a busy machine changes less; and its largest resident memory."""

    secs: float
    cpu_secs: float
    megabytes: float = 0.0


@dataclass(frozen=True)
class Job:
    """A whole process to be timed."""

    command: tuple[str, ...]
    folder: Path
    expected: str
    """Pattern of its output, so that no other kind of run is timed by mistake."""
    variables: Mapping[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (0,)

    def run(self) -> Took:
        environment = {**ENVIRONMENT, **self.variables}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
            start = time.perf_counter()
            process = subprocess.Popen(self.command, cwd=self.folder, env=environment, stdout=out, stderr=error)
            _, status, usage = os.wait4(process.pid, 0)
            secs, process.returncode = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
            printed, errors = (_content(file) for file in (out, error))
        if process.returncode not in self.codes or not re.fullmatch(self.expected, printed.strip(), re.DOTALL):
            sys.exit(f"{' '.join(self.command)} in {self.folder} was to print {self.expected!r}:\n{printed[-500:]}{errors[-500:]}")
        return Took(secs, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def copying_jobs(folder: Path, count: int) -> dict[str, Job]:
    """Return the other tools' null builds, after their first builds; those that are not installed are left out."""
    tools: dict[str, Callable[[Path, int], Job]] = {"ninja": _ninja, "make": _make, "doit": _doit}
    jobs: dict[str, Job] = {}
    for tool, job_of in tools.items():
        if not has_tool(tool):
            continue
        place = folder / tool
        if not (place / "out").is_dir():
            for name in ("src", "out"):
                (place / name).mkdir(parents=True, exist_ok=True)
            for index in range(count):
                (place / "src" / str(index)).write_text(f"{index}\n", encoding="utf-8")
        jobs[tool] = job_of(place, count)
        subprocess.run(jobs[tool].command, cwd=place, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    return jobs


def has_tool(name: str) -> bool:
    if name == "doit":
        return subprocess.run([sys.executable, "-c", "import doit"], capture_output=True, check=False).returncode == 0
    return shutil.which(name) is not None


def _ninja(place: Path, count: int) -> Job:
    edges = "".join(f"build out/{index}: cp src/{index}\n" for index in range(count))
    write_if_other(place / "build.ninja", f"rule cp\n  command = cp $in $out\n{edges}")
    return Job(("ninja",), place, "ninja: no work to do.")


def _make(place: Path, count: int) -> Job:
    outputs = " ".join(f"out/{index}" for index in range(count))
    rules = "".join(f"out/{index}: src/{index}\n\tcp src/{index} out/{index}\n" for index in range(count))
    # Without built-in rules, as large makefiles are written: make would look for a source of each source.
    write_if_other(place / "Makefile", f"MAKEFLAGS += -rR\n.PHONY: all\nall: {outputs}\n{rules}")
    return Job(("make",), place, "make: Nothing to be done for 'all'.")


DODO = """\
import shutil


def task_cp():
    for index in range({count}):
        source, output = f"src/{{index}}", f"out/{{index}}"
        yield {{"name": str(index), "actions": [(shutil.copyfile, [source, output])], "file_dep": [source], "targets": [output]}}
"""


def _doit(place: Path, count: int) -> Job:
    write_if_other(place / "dodo.py", DODO.format(count=count))
    return Job((sys.executable, "-m", "doit"), place, r"(-- cp:\d+\s*)+")


def _made(root: Path, text: str, before: Path | None) -> None:
    """Make a workspace in a process of its own: a child's memory is never less than what its parent had."""
    process = multiprocessing.get_context("spawn").Process(target=make_workspace, args=(root, text, before))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{root} could not be made")


def null_builds(folder: Path, count: int, rounds: int) -> list[dict[str, Any]]:
    """Measure builds with nothing to do."""
    expected = f"{count} entries: {count} up to date"
    jobs: dict[str, Job] = {}
    before: Path | None = None
    for name, layout in LAYOUTS.items():
        root = folder / name.replace(" ", "-")
        if count > MOST_COMPARED and layout is not one_table:
            continue
        _made(root, layout(shapes_of(count)), before)
        before = root
        jobs[f"kerneldecl, {name}"] = Job((*KERNELDECL, "build"), root, expected)
    script = Path(sys.executable).with_name("kerneldecl")
    if script.exists() and count <= MOST_COMPARED:
        jobs["kerneldecl's script, a table each"] = Job((str(script), "build"), folder / "a-table-each", expected)
    jobs |= copying_jobs(folder, count)
    samples = interleaved({name: job.run for name, job in jobs.items()}, rounds)
    limits = {name: LIMITS_MS.get(count) for name in samples if name.startswith("kerneldecl")}
    return [_row({"entries": count, "tool": name}, secs, limits.get(name)) for name, secs in samples.items()]


def edited(folder: Path, count: int, rounds: int) -> list[dict[str, Any]]:
    """Measure plans and builds after workloads.toml was edited."""
    rows: list[dict[str, Any]] = []
    for name, layout in LAYOUTS.items():
        root, shapes, limit = folder / name.replace(" ", "-"), shapes_of(count), EDIT_LIMIT_MS.get(count)
        editor = Editor(root, layout, shapes)
        cases = {
            "plan, a comment changed": lambda e=editor: e.after_comment("plan"),
            "build, a comment changed": lambda e=editor: e.after_comment("build"),
            "plan, one entry changed": lambda e=editor: e.after_change(),
        }
        samples = interleaved(cases, rounds) | interleaved({"plan, memo lost": editor.without_memo}, min(rounds, 3))
        editor.restore()
        limits = {spec: limit for spec in samples if "changed" in spec}
        rows += [_row({"entries": count, "file": name, "spec": spec}, secs, limits.get(spec)) for spec, secs in samples.items()]
    return rows


class Editor:
    """Edits a workspace's file before each run, each time differently."""

    def __init__(self, root: Path, layout: Layout, shapes: Sequence[Shape]) -> None:
        self._root, self._layout, self._shapes, self._edits = root, layout, shapes, 0
        self._memo = (root / "cache" / "memo.json").read_bytes()

    def after_comment(self, command: str) -> Took:
        self._write(self._layout(self._shapes), self._memo)
        return self._run(command, len(self._shapes))

    def after_change(self) -> Took:
        shapes = [(65 + self._edits, 1), *self._shapes[1:]]
        self._write(self._layout(shapes), self._memo)
        return self._run("plan", len(shapes) - 1)

    def without_memo(self) -> Took:
        self._write(self._layout(self._shapes), None)
        return self._run("plan", len(self._shapes))

    def restore(self) -> None:
        self._write(self._layout(self._shapes), self._memo)
        (self._root / "workloads.toml").write_text(self._layout(self._shapes), encoding="utf-8")
        self._run("build", len(self._shapes))

    def _write(self, text: str, memo: bytes | None) -> None:
        self._edits += 1
        (self._root / "workloads.toml").write_text(f"{text}# edit {self._edits}\n", encoding="utf-8")
        path = self._root / "cache" / "memo.json"
        if memo is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(memo)

    def _run(self, command: str, up_to_date: int) -> Took:
        return Job((*KERNELDECL, command), self._root, rf".*{len(self._shapes)} entries: {up_to_date} up to date.*").run()


def in_clones(folder: Path, count: int, rounds: int) -> list[dict[str, Any]]:
    """Measure a plan in a fresh clone, and a build that finds records and artifact and nothing else."""
    built = folder / "declared"
    _made(built, declared(tables(shapes_of(count))), None)
    fresh = clone(built, folder / "clone", with_artifact=False)
    whole = clone(built, folder / "whole", with_artifact=True)
    nothing = Job((*KERNELDECL, "build"), whole, f"{count} entries: {count} up to date")

    def build() -> Took:
        forget(whole)
        return nothing.run()

    planned = rf"(build [^\n]*\n)*link [^\n]*\n{count} entries: 0 up to date; {count + 1} actions to run"
    cases = {"plan, fresh clone": Job((*KERNELDECL, "plan"), fresh, planned).run, "build, nothing to make": build}
    samples = interleaved(cases, rounds)
    limits = {"plan, fresh clone": CLONE_LIMITS.get(count), "build, nothing to make": WHOLE_LIMITS.get(count)}
    return [_costs({"entries": count, "spec": spec}, secs, limits[spec]) for spec, secs in samples.items()]


def commented(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure what becomes of this repository's h200 entries after a comment in a policy, on a machine without the GPU."""
    root = repository(folder / "repository")
    edits = iter(range(1_000_000))

    def after(*command: str) -> Callable[[], Took]:
        job = Job((*KERNELDECL, *command), root, expected[command[0]], {"PYTHONPATH": str(root)})

        def run() -> Took:
            comment(root, next(edits))
            return job.run()

        return run

    # Objects are not there: a clone has the records alone.
    expected = {"plan": r"([^\n]*\n)*\d+ entries: 0 up to date; \d+ actions to run", "check": r".*"}
    cases = {"plan": after("plan", "*@h200"), "check --stale": after("check", "--stale", "*@h200")}
    samples = interleaved(cases, rounds)
    return [_costs({"spec": f"{spec} '*@h200', a comment in a policy"}, secs, COMMENT_LIMITS) for spec, secs in samples.items()]


def imports(rounds: int) -> dict[str, Any]:
    """Measure the time of `import kerneldecl`, less that of an interpreter that does nothing."""
    here = Path.cwd()
    cases = {code: Job((sys.executable, "-c", code), here, "").run for code in ("pass", "import kerneldecl")}
    samples = interleaved(cases, rounds)
    pairs = zip(samples["pass"], samples["import kerneldecl"], strict=True)
    differences = [Took(after.secs - before.secs, after.cpu_secs - before.cpu_secs) for before, after in pairs]
    nothing = _row({"case": "python -c pass"}, samples["pass"], None)
    return {"nothing": nothing, "import": _row({"case": "import kerneldecl, less that"}, differences, IMPORT_LIMIT_MS)}


def imported_modules(root: Path) -> list[str]:
    """Return the modules that a null build imports, without those of the bare interpreter."""
    found: list[set[str]] = []
    for rest in (("-c", "pass"), ("-m", "kerneldecl", "build")):
        command = (sys.executable, "-X", "importtime", *rest)
        report = subprocess.run(command, cwd=root, env=ENVIRONMENT, capture_output=True, text=True, check=True).stderr
        found.append(set(re.findall(r"import time:\s+\d+ \|\s+\d+ \|\s+(\S+)", report)))
    bare, build = found
    return sorted(build - bare)


def _row(labels: Mapping[str, Any], samples: Sequence[Took], limit_ms: float | None) -> dict[str, Any]:
    """Return the row of a wall time, and whether that is within its limit."""
    row = _figures(labels, samples)
    return row if limit_ms is None else {**row, "limit ms": limit_ms, "within": "yes" if row["median ms"] <= limit_ms else "NO"}


def _costs(labels: Mapping[str, Any], samples: Sequence[Took], limits: tuple[float, float | None] | None) -> dict[str, Any]:
    """Return the row of a processor time and a peak of memory, and whether they are within their limits."""
    row = _figures(labels, samples)
    if limits is None:
        return row
    most_ms, most_mb = limits
    is_within = row["CPU ms"] <= most_ms and (most_mb is None or row["MB"] <= most_mb)
    return {**row, "limit CPU ms": most_ms, "limit MB": most_mb, "within": "yes" if is_within else "NO"}


def _figures(labels: Mapping[str, Any], samples: Sequence[Took]) -> dict[str, Any]:
    wall, cpu = ([getattr(took, name) * 1e3 for took in samples] for name in ("secs", "cpu_secs"))
    figures = {"median ms": statistics.median(wall), "min ms": min(wall), "CPU ms": statistics.median(cpu)}
    figures["MB"] = max(took.megabytes for took in samples)
    return {**labels, **{name: round(value, 1) for name, value in figures.items()}, "runs": len(samples)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time builds that have nothing to do: kerneldecl beside ninja, GNU make and doit.")
    parser.add_argument("--entries", type=int, nargs="+", default=DEFAULT_ENTRIES, help="sizes of the workspaces")
    parser.add_argument("--rounds", type=int, default=11, help="runs of each")
    parser.add_argument("--folder", type=Path, help="folder of the workspaces, which a later run reuses; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    asked = parser.parse_args()
    described = machine()
    show_machine(described)
    if missing := [tool for tool in ("ninja", "make", "doit") if not has_tool(tool)]:
        print(f"not installed, left out: {', '.join(missing)}")
    with nullcontext(asked.folder) if asked.folder else tempfile.TemporaryDirectory(prefix="null-build-") as folder:
        places = {count: Path(folder).resolve() / str(count) for count in asked.entries}
        null = [row for count, place in places.items() for row in null_builds(place, count, asked.rounds)]
        show("Nothing to do, nothing changed", null)
        edits = [row for count, place in places.items() if count <= MOST_COMPARED for row in edited(place, count, asked.rounds)]
        show("workloads.toml edited", edits)
        compared = {count: place for count, place in places.items() if count <= MOST_COMPARED}
        clean = [row for count, place in compared.items() for row in in_clones(place, count, min(asked.rounds, 5))]
        show("No memo, no stamp, no state", clean)
        policy = commented(Path(folder).resolve(), min(asked.rounds, 5))
        show("A comment in a policy, entries for a GPU that is not here", policy)
        modules = imported_modules(next(iter(places.values())) / "one-table")
    importing = imports(asked.rounds)
    show("Imports", list(importing.values()))
    unwanted = ", ".join(name for name in modules if name.partition(".")[0] in UNWANTED)
    print(f"\nA null build imports {len(modules)} modules: {', '.join(modules)}\nOf {', '.join(UNWANTED)}: {unwanted or 'none'}")
    results = {
        "null_builds": null,
        "edited": edits,
        "clones": clean,
        "comment": policy,
        "imports": importing,
        "modules": modules,
        "missing": missing,
    }
    write_json(asked.json, described, results)


if __name__ == "__main__":
    main()
