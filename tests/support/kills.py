"""Owns builds that are killed, run side by side and edited under way, as often as one likes, and what is found wrong after them.

Knows nothing of how a build works. `PYTHONPATH=tests:. python -m support.kills --kills 200 --rounds 50 --edits 50` runs them on real
builds of tiny kernels; a seed gives the same moments again, as far as a machine can.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kerneldecl.artifact.manifest import artifact_defect
from kerneldecl.store.files import write_whole
from kerneldecl.store.local import LocalStore, store_stats
from support.spaces import REAL, Space

COMPUTATIONS = 4
VICTIMS = ("main", "group", "worker")
TOGETHER = 8
LIMIT_SECS = 300
"""No build takes so long: one that does hangs."""
EDITS: Sequence[tuple[str, Sequence[str]]] = (
    ("workloads.toml", ("m = 16", "m = 20")),
    ("policies/plain.py", ("CHOICES = (0, 1)", "CHOICES = (1,)")),
    ("templates/plain.py", ('if params["parallel"]:', 'if not params["parallel"]:')),
)
"""What is edited while a build runs: a file, and what may stand in it, one at a time."""
Setting = tuple[int, ...]
"""Which of its texts each of EDITS has."""


@dataclass
class Trial:
    """A workspace whose temporary files are its own, and what was found wrong with it."""

    space: Space
    aside: Path
    """Where its builds, and the compilers that they start, put what is temporary: no file is left after a complete build."""
    wrong: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """How the builds ended, by victim and exit code."""

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.space.start(*arguments, TMPDIR=str(self.aside), XDG_RUNTIME_DIR=str(self.aside / "none"))

    def check(self, what: str, is_right: object) -> None:
        if not is_right:
            self.wrong.append(what)

    def finish(self, process: subprocess.Popen[str], what: str, codes: Sequence[int] = (0,)) -> str:
        """Wait until a build has ended, which must be with one of these exit codes; return what it said."""
        try:
            out, err = process.communicate(timeout=LIMIT_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            self.wrong.append(f"{what}: hangs")
        self.ends[f"{what} {process.returncode}"] += 1
        self.check(f"{what}: exit code {process.returncode}\n{out}\n{err}", process.returncode in codes)
        return out + err

    def looks_sound(self, before: dict[Path, bytes]) -> None:
        """Check what must hold after any end: nothing finished is lost, nothing damaged, an artifact is whole or not there."""
        self.check("a finished record was changed or lost", all(p.exists() and p.read_bytes() == text for p, text in before.items()))
        damaged = store_stats(LocalStore(self.space.root / "cache"))["damaged"]
        self.check(f"damaged: {damaged}", not damaged)
        for path in set(self.space.records("tune")) - before.keys():
            trials = json.loads(path.read_text())["result"]["trials"]
            failures = [trial["failure"] for trial in trials if trial.get("failure")]
            self.check(f"a record holds failures against sound candidates: {failures}", not failures)
        for manifest in self.space.root.glob("dist/*/host/manifest.json"):
            defect = artifact_defect(manifest.parent)
            self.check(f"an artifact is neither whole nor absent: {defect}", not defect)

    def is_complete(self) -> None:
        """Check that a build gets to the end, and leaves nothing but results: then the next one has nothing to do."""
        self.finish(self.start("build"), "last build")
        left = [*left_behind(self.space.root), *map(str, filter(Path.is_file, self.aside.rglob("*")))]
        self.check(f"left behind: {left}", not left)
        self.check("processes are left", not [p for p in processes_of(self.aside) if p.is_running()])
        self.finish(self.start("verify"), "verify")
        again = self.finish(self.start("build"), "null build")
        self.check(f"the build after a complete one says {again}", again == f"{COMPUTATIONS} entries: {COMPUTATIONS} up to date\n")


def left_behind(folder: Path) -> list[str]:
    """Return what no complete build leaves: parts of files, folders of artifacts under way, scratch folders and their locks."""
    names = (path for path in folder.rglob("*") if path.name.endswith(".part") or path.name.startswith((".", "scratch-", "worker-", "tmp")))
    return [str(path.relative_to(folder)) for path in names if path.name != ".gitignore"]


def processes_of(aside: Path) -> list[psutil.Process]:
    """Return all processes that have this folder for what is temporary: those of the trial's builds, and of no other's."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR", "").startswith(str(aside)):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def end(process: subprocess.Popen[str], victim: str, rng: random.Random) -> bool:
    """Kill a build's main process, one of its workers or what these have started, or all of them; say whether there was such a one."""
    try:
        below = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return False
    if victim == "worker" and not below:
        return False
    chosen = {"main": [process.pid], "worker": rng.sample(below, min(1, len(below))), "group": [process.pid, *below]}[victim]
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def take_away(trial: Trial, rng: random.Random) -> None:
    """Remove some results of a complete build, so that the next one has work."""
    root = trial.space.root
    shutil.rmtree(root / "dist", ignore_errors=True)
    shutil.rmtree(root / "cache" / rng.choice(["blob", "local/measure", "local/lower", "local/build"]), ignore_errors=True)
    tuned = trial.space.records("tune")
    for path in rng.sample(tuned, min(2, len(tuned))):
        path.unlink()


def kill_builds(trial: Trial, kills: int, rng: random.Random) -> None:
    """Kill builds at random moments; what is killed must have been there, so a build that is over first is repeated."""
    done, longest_secs = 0, 6.0
    while done < kills and len(trial.wrong) < 20:
        victim, before = VICTIMS[done % len(VICTIMS)], {path: path.read_bytes() for path in trial.space.records("*")}
        process, start = trial.start("build", "--keep-going"), time.monotonic()
        time.sleep(rng.uniform(0.05, longest_secs))
        done += end(process, victim, rng) if process.poll() is None else 0
        said = trial.finish(process, victim, (0,) if victim == "worker" else (0, -signal.SIGKILL))
        _, alive = psutil.wait_procs(processes_of(trial.aside), timeout=20)
        trial.check(f"{victim}: processes live on: {alive}\n{said}", not alive)
        trial.looks_sound(before)
        if process.returncode == 0:
            longest_secs = time.monotonic() - start  # on a busy machine all takes longer
            take_away(trial, rng)
    trial.is_complete()


def build_at_once(trial: Trial, rounds: int, rng: random.Random) -> None:
    """Run several builds at once, which must share the work."""
    for _ in range(rounds):
        before = {path: path.read_bytes() for path in trial.space.records("*")}
        tuned = len(trial.space.records("tune"))
        together = [trial.start("build") for _ in range(TOGETHER)]
        said = [trial.finish(process, "at once") for process in together]
        lines = "".join(said).splitlines()
        count = sum(line.startswith("tuned [") for line in lines)
        trial.check(f"{count} tuned, {COMPUTATIONS - tuned} were to be", count == COMPUTATIONS - tuned)
        trial.looks_sound(before)
        take_away(trial, rng)
        if len(trial.wrong) > 20:
            return
    trial.is_complete()


def write(space: Space, setting: Setting) -> None:
    """Edit the sources, each file in one moment: half of one would be a mistake of its author."""
    for (name, texts), chosen in zip(EDITS, setting, strict=True):
        write_whole(space.root / name, REAL[name].replace(texts[0], texts[chosen]), durable=False)


def found(space: Space) -> dict[str, object]:
    """Return what an artifact holds of each entry: its computation, the key of its record, and what the record has of each candidate."""
    manifest = space.json(str((space.artifact() / "manifest.json").relative_to(space.root)))
    store = LocalStore(space.root / "cache")
    entries: dict[str, object] = {}
    for entry in manifest["entries"]:
        record = json.loads(store.record_path("tune", entry["key"], is_local=True).read_text())["result"]
        trials = sorted((json.dumps(t["candidate"]), t["schedule_digest"], t["code_digest"]) for t in record["trials"])
        entries[entry["name"]] = (entry["computation"], entry["key"], trials)
    return entries


def settings() -> Iterator[Setting]:
    yield from ((m, p, t) for m in (0, 1) for p in (0, 1) for t in (0, 1))


def edit_builds(trial: Trial, edits: int, rng: random.Random, folder: Path) -> None:
    """Edit what a build reads at a random moment of it; the build after it must leave what one from nothing leaves."""
    clean: dict[Setting, dict[str, object]] = {}
    now: Setting = (0, 0, 0)
    for _ in range(edits):
        write(trial.space, now)
        process = trial.start("build")
        time.sleep(rng.uniform(0.05, 5.0))
        at = rng.randrange(len(EDITS))
        now = tuple(1 - chosen if place == at else chosen for place, chosen in enumerate(now))
        write(trial.space, now)
        trial.finish(process, "edited")
        trial.looks_sound({})
        trial.finish(trial.start("build"), "after an edit")
        if now not in clean:
            other = Trial(Space(folder / f"clean-{len(clean)}"), trial.aside)
            other.space.write(REAL)
            write(other.space, now)
            trial.finish(other.start("build"), "from nothing")
            clean[now] = found(other.space)
        trial.check(f"after edits to {now} the artifact holds {found(trial.space)}, not {clean[now]}", found(trial.space) == clean[now])
        if rng.random() < 0.5:
            shutil.rmtree(trial.space.root / "cache")
        if len(trial.wrong) > 20:
            return
    trial.is_complete()


def new_trial(folder: Path) -> Trial:
    aside = folder / "aside"
    aside.mkdir(parents=True)
    (folder / "space").mkdir()
    return Trial(Space(folder / "space").write(REAL), aside)


def run(name: str, trial: Trial, count: int, rng: random.Random) -> None:
    if name == "kills":
        kill_builds(trial, count, rng)
    elif name == "rounds":
        build_at_once(trial, count, rng)
    else:
        edit_builds(trial, count, rng, trial.space.root.parent)


def main() -> int:
    """Kill, crowd and edit builds and print what was found wrong; return 1 where anything was."""
    parser = argparse.ArgumentParser(description="Interrupt real builds at random moments; nothing may be lost, wrong or left behind.")
    for name in ("kills", "rounds", "edits"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=16)
    options = parser.parse_args()
    wrong: list[str] = []
    for name in ("kills", "rounds", "edits"):
        count, start, rng = getattr(options, name), time.monotonic(), random.Random(options.seed)
        if not count:
            continue
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            trial = new_trial(Path(folder))
            with contextlib.suppress(KeyboardInterrupt):  # what was found until then is told
                run(name, trial, count, rng)
        print(f"{name} {count}: {len(trial.wrong)} wrong, {time.monotonic() - start:.0f} s, ends {dict(trial.ends)}", flush=True)  # noqa: T201
        print("".join(f"  {each}\n" for each in trial.wrong), end="", flush=True)  # noqa: T201
        wrong += trial.wrong
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
