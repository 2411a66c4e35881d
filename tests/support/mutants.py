"""Owns mutants of the files that kerneldecl reads: each is read by the commands that read it, and must end in a sentence.

Knows nothing of what is wrong with a mutant. `PYTHONPATH=tests:. python -m support.mutants --count 20000` runs so many; a seed gives
the same ones again. Nothing is compiled: builds run on fakes.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kerneldecl import api
from kerneldecl.artifact.load import load
from kerneldecl.artifact.manifest import with_digest
from kerneldecl.compare.sides import read_side
from kerneldecl.errors import KerneldeclError
from kerneldecl.package.folder import read_package
from kerneldecl.package.place import opened_package
from kerneldecl.package.tar import unpack_tar
from kerneldecl.planning.published import note
from kerneldecl.store.keys import digest
from support.fakes import Answer, FakeRunner, Request
from support.repository import REPOSITORY
from support.spaces import FAKES, Space

LIMIT_SECS = 30
"""A command that takes longer hangs: these take some hundredths of a second."""
WEIRD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, -0.0, float("nan"), float("inf")),
    *("", "x", "..", "../../x", "/etc/passwd", "\x1b[2J\x07", "\n", "\0", "\ud800", "a" * 5000, "0" * 64, "kd_" + "0" * 20),
    *([], {}, [[]], [None], {"": None}, {"template": "../x", "params": {}}, [[[[[[[[]]]]]]]]),
)
TOKENS = (
    *(b"9" * 5000, b"-1", b"1e999", b"nan", b"[" * 200, b"]", b"{", b"}", b'"', b"'''", b"=", b"..", b"#"),
    *(b"\0", b"\x1b[2J", b"\xff\xfe", b"\n"),
)


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return the content with one to three pieces flipped, removed, repeated, moved or replaced."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice((1, 1, 2, 5, 20, 200)))
        piece = content[at:end]
        other = rng.choice((b"", piece * 2, bytes(rng.randrange(256) for _ in piece), rng.choice(TOKENS), piece[::-1], content[:20]))
        content = content[:at] + other + content[end:]
        if rng.random() < 0.05:
            content = content[: rng.randrange(len(content) + 1)]
    return content


def mutated_json(value: Any, rng: random.Random) -> Any:
    """Return the value with one place replaced, removed, renamed or wrapped."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        rest = {key: item for key, item in value.items() if key != name}
        ways: tuple[Callable[[], Any], ...] = (lambda: rest, lambda: {**rest, f"{name}x": value[name]})
        return rng.choice(ways)() if rng.random() < 0.15 else {**value, name: mutated_json(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], mutated_json(value[at], rng), *value[at + 1 :]]
    return [value] if rng.random() < 0.1 else rng.choice(WEIRD)


class SafeRunner(FakeRunner):
    """Answers with a failure where a fake raises, as workers do."""

    def _answer(self, request: Request) -> Answer:
        try:
            return super()._answer(request)
        except Exception as error:  # noqa: BLE001
            return {"failure": f"{type(error).__name__}: {error}"}


@dataclass(frozen=True)
class Kind:
    """A kind of file: how it is found and mutated, and what reads it."""

    pattern: str
    mutate: Callable[[bytes, random.Random], bytes]
    read: Callable[[Space, random.Random], str]
    """Read it, and return what is wrong with how that ended; nothing where it ended as it must."""


def _signed_json(sign: Callable[[Any], bytes]) -> Callable[[bytes, random.Random], bytes]:
    """Return a mutation of JSON that an attacker would make: with the right digest, in most cases."""

    def mutate(content: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.25:
            return mutated_bytes(content, rng)
        value = json.loads(content)
        for _ in range(rng.randint(1, 3)):
            value = mutated_json(value, rng)
        return sign(value)

    return mutate


def _plain(value: Any) -> bytes:
    return json.dumps(value).encode()


def _as_record(value: Any) -> bytes:
    if isinstance(value, dict) and "result" in value:
        body = json.dumps(value["result"], sort_keys=True, separators=(",", ":"))
        value = {**value, "digest": digest(body.encode())}
    return _plain(value)


def _as_manifest(value: Any) -> bytes:
    return with_digest(value) if isinstance(value, dict) and all(isinstance(key, str) for key in value) else _plain(value)


def _commands(*lines: str) -> Callable[[Space, random.Random], str]:
    def read(space: Space, rng: random.Random) -> str:
        arguments = rng.choice(lines).split()
        done = space.command(*arguments, runner=SafeRunner())
        words = f"{done.out}{done.err}"
        if done.code == 5:
            return f"{' '.join(arguments)}: {words[-600:]}"
        return f"{' '.join(arguments)} prints control characters" if any(char < " " and char not in "\n\t" for char in words) else ""

    return read


def _load(space: Space, _: random.Random) -> str:
    with mock.patch("kerneldecl.artifact.kernels.load_library"), mock.patch("kerneldecl.artifact.load.set_threads"):
        return _ends(functools.partial(load, space.artifact("box")))


def _measure(space: Space, _: random.Random) -> str:
    (folder,) = (space.root / "dist").glob("*/gpu.bundle")
    with (
        mock.patch.object(api, "why_not_measured_here", return_value=""),
        mock.patch.object(api, "LocalRunner", return_value=contextlib.nullcontext(SafeRunner())),
    ):
        return _ends(functools.partial(api.measure_bundle, folder, space.root / "elsewhere"))


def _as_statement(value: Any) -> bytes:
    """Return an envelope of what it holds, which nobody has signed."""
    return json.dumps({"payloadType": "application/vnd.in-toto+json", "payload": _in_base64(_plain(value)), "signatures": []}).encode()


def _in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _mutated_statement(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return _signed_json(_plain)(content, rng)
    return _signed_json(_as_statement)(base64.b64decode(json.loads(content)["payload"]), rng)


def _mutated_line(content: bytes, rng: random.Random) -> bytes:
    """Return a log with another line, or other bytes."""
    if rng.random() < 0.3:
        return mutated_bytes(content, rng)
    lines = content.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    lines[place] = _signed_json(lambda value: json.dumps(value).encode() + b"\n")(lines[place], rng)
    return b"".join(lines)


def _packed(space: Space, _: random.Random) -> str:
    def read() -> None:
        with opened_package(space.root / "package.tar", None):
            pass

    return _ends(read)


def _package(space: Space, _: random.Random) -> str:
    """Read a package, and what is compared of it."""
    return _ends(lambda: read_package(space.root / "package", None)) or _ends(lambda: read_side(space.root, "package"))


def _ends(action: Callable[[], object]) -> str:
    try:
        action()
    except KerneldeclError:
        return ""
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


READING = ("plan", "plan *", "show", "show small", "query *", "why small", "check --stale", "cache stats", "build", "report")
KINDS: Mapping[str, Kind] = {
    "declarations": Kind("workloads.toml", mutated_bytes, _commands("check", "plan", "schema", "build")),
    "lock": Kind("workloads.lock", mutated_bytes, _commands("check --stale", "build --locked", "plan", "report --against workloads.lock")),
    "lower record": Kind("cache/record/lower/*.json", _signed_json(_as_record), _commands(*READING)),
    "tune record": Kind("cache/record/tune/*.json", _signed_json(_as_record), _commands(*READING)),
    "measure record": Kind("cache/record/measure/*.json", _signed_json(_as_record), _commands("cache stats", "build")),
    "manifest": Kind("dist/*/box/manifest.json", _signed_json(_as_manifest), _load),
    "built artifact": Kind("dist/*/box/manifest.json", _signed_json(_as_manifest), _commands("plan *", "build")),
    "bundle": Kind("dist/*/gpu.bundle/bundle.json", _signed_json(_plain), _measure),
    "package": Kind("package.tar", mutated_bytes, _packed),
    "provenance": Kind("package/provenance.json", _mutated_statement, _package),
    "measurements": Kind("package/measured.json", _mutated_statement, _package),
    "published": Kind("published.toml", mutated_bytes, _commands("build", "plan")),
    "rule": Kind("rules/scale.py", mutated_bytes, _commands("check", "plan")),
    "arch": Kind("archs/test-cpu.toml", mutated_bytes, _commands("check", "plan")),
    "state": Kind("cache/state.json", _signed_json(_plain), _commands("why small", "plan *", "build")),
    "events": Kind("cache/events.jsonl", _mutated_line, _commands("log last", "top --once", "report")),
    "memo": Kind("cache/memo.json", _signed_json(_plain), _commands("plan", "build")),
    "stamp": Kind("cache/stamp.txt", mutated_bytes, _commands("plan", "build")),
}


def make_pristine(root: Path) -> Space:
    """Build a workspace with a CPU's artifact and a GPU's bundle, on fakes."""
    gpu = (REPOSITORY / "kerneldecl/archs/h200.toml").read_text(encoding="utf-8").replace('"NVIDIA H200"', '"Test GPU"')
    space = Space(root).write(FAKES).write({"archs/test-gpu.toml": gpu})
    with mock.patch("kerneldecl.stages.toolchain.nvcc.compiler_for"), mock.patch("kerneldecl.stages.toolchain.is_cuda"):
        space.edit("workloads.toml", '[target.box]\narch = "test-cpu"', '[target.gpu]\narch = "test-gpu"')
        space.build(measure=False)
    space.write({"workloads.toml": FAKES["workloads.toml"]})
    for folder in (*(space.root / "dist").glob("*/gpu"), space.root / "cache"):
        shutil.rmtree(folder)
    assert space.command("build", runner=FakeRunner()).code == 0
    assert space.command("export", "--format", "tar", "-o", str(space.root / "package.tar")).code == 0
    (space.root / "package").mkdir()
    unpack_tar(space.root / "package.tar", space.root / "package")
    note(space.root, space.json("package/artifact/manifest.json"), "oci://registry.example/fakes:1.0")
    return space


class Mutants:
    """Mutants of one workspace, made and read one after the other."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._pristine = make_pristine(folder / "pristine")
        self._space = Space(folder / "mutant")
        self._seed = seed
        self._restore()

    def run(self, name: str, number: int) -> str:
        """Make and read one mutant; return what is wrong with how that ended, nothing where it ended as it must."""
        kind, rng = KINDS[name], random.Random(f"{self._seed} {name} {number}")
        path = rng.choice(sorted(self._space.root.glob(kind.pattern)))
        before, times = path.read_bytes(), path.stat()
        path.write_bytes(kind.mutate(before, rng))
        try:
            with _limited(LIMIT_SECS), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a mutated rule may warn of what it holds
                wrong = kind.read(self._space, rng)
        except TimeoutError:
            wrong = f"took more than {LIMIT_SECS} s"
        if path.is_file():
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if self._listing() != self._restored:
            self._restore()
        return f"{name} {number}: {wrong}" if wrong else ""

    def _restore(self) -> None:
        shutil.rmtree(self._space.root, ignore_errors=True)
        shutil.copytree(self._pristine.root, self._space.root)
        self._restored = self._listing()

    def _listing(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of every file: most commands change none, and copying all takes longer than most commands."""
        found = []
        for folder, _, names in os.walk(self._space.root):
            for name in names:
                status = Path(folder, name).stat()
                found.append((f"{folder}/{name}", status.st_size, status.st_mtime_ns))
        return sorted(found)


@contextlib.contextmanager
def _limited(secs: int) -> Iterator[None]:
    def over(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(secs)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_mutants(folder: Path, count: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[tuple[str, str]]:
    """Yield the kind of each of `count` mutants, dealt evenly to the kinds, and what is wrong with how it ended."""
    mutants = Mutants(folder, seed)
    for number in range(count):
        name = kinds[number % len(kinds)]
        yield name, mutants.run(name, number // len(kinds))


def main() -> int:
    """Run mutants and print what ended wrongly; return 1 where one did."""
    parser = argparse.ArgumentParser(description="Read mutants of every kind of file; none may end a command with 5 or hang.")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, action="append")
    asked = parser.parse_args()
    start, ran, wrong = time.monotonic(), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        for name, found in run_mutants(Path(folder), asked.count, asked.seed, asked.kind or tuple(KINDS)):
            ran[name] += 1
            if found:
                wrong[name] += 1
                print(found, flush=True)  # noqa: T201
    for name, count in ran.items():
        print(f"{name:<16} {count:>6} mutants, {wrong[name]} ended wrongly")  # noqa: T201
    print(f"{sum(ran.values())} mutants in {time.monotonic() - start:.0f} s, {sum(wrong.values())} ended wrongly")  # noqa: T201
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
