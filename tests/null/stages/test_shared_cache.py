"""Owns the tests of builds that share a cache: what one machine has found out no other does, and no cache can make a build fail or wrong.

Knows nothing of TVM. Servers are real ones on loopback.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import zstandard
from support.cache_servers import Server, nginx, serving
from support.fakes import FakeRunner
from support.repository import REPOSITORY
from support.spaces import ENTRIES, FAKES, HEAD, Command, Space, clean_environment

from kerneldecl.errors import ExitCode
from kerneldecl.store import shared_entry, signing
from kerneldecl.store.folder_cache import FolderCache
from kerneldecl.store.inside import is_digest
from kerneldecl.store.keys import digest
from kerneldecl.store.local import LocalStore, Record
from kerneldecl.store.protocol import Wanted
from kerneldecl.store.remote import SharedCache
from kerneldecl.store.shared import Access, SharedStore, access_to, store_of_worker

KEPT = ("lower", "propose", "tune")


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    for name in ("HOST", "TOKEN", "USER", "PASSWORD"):
        monkeypatch.delenv(f"KERNELDECL_CACHE_{name}", raising=False)
    monkeypatch.delenv(signing.SIGNING_KEY, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Space]:
    """Make a workspace of its own, as another machine has it, on a shared cache."""

    def make(name: str, url: object, mode: str = "read-write", more: str = "") -> Space:
        table = f'\n[cache]\nurl = "{url}"\nmode = "{mode}"\n{more}'
        (tmp_path / name).mkdir()
        return Space(tmp_path / name).write({**FAKES, "workloads.toml": HEAD + table + ENTRIES})

    return make


class Warm(NamedTuple):
    """What a first machine leaves on a server, and what it builds."""

    kept: dict[str, bytes]
    artifact: dict[str, str]
    lock: str
    tuned: frozenset[str]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        root = tmp_path_factory.mktemp("first")
        space = Space(root).write({**FAKES, "workloads.toml": f'{HEAD}\n[cache]\nurl = "{server.url}"\n{ENTRIES}'})
        built(space, "--cache", "read-write")
        tuned = frozenset(path.stem for path in space.records("tune"))
        kept = {path: content for path, content in server.kept.items() if b'"path":"claim"' not in content}  # none of minutes ago
        return Warm(kept, space.artifact_files(), space.read("workloads.lock"), tuned)


@pytest.fixture
def warm_server(warm: Warm, server: Server) -> Server:
    server.kept.update(warm.kept)
    return server


def built(space: Space, *arguments: str) -> tuple[Command, FakeRunner]:
    runner = FakeRunner()
    done = space.command("build", *arguments, runner=runner)
    assert done.code == 0, done.err
    return done, runner


def warnings(done: Command) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("the shared cache")]


def entries(server: Server) -> dict[str, bytes]:
    return {path: content for path, content in server.kept.items() if "/ac/" in path}


@pytest.mark.parametrize("kind", ["nginx", "folder", "own", "validating"])
def test_a_second_machine_finds_everything(kind: str, machine: Callable[..., Space], server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    with nginx(tmp_path / "server") if kind == "nginx" else contextlib.nullcontext() as where:
        url = {"nginx": where, "folder": folder, "own": server.url, "validating": server.url}[kind]
        server.fault = "validates entries" if kind == "validating" else ""
        first, _ = built(a := machine("a", url))
        second, runner = built(b := machine("b", url, "required"))
    assert warnings(first) == warnings(second) == []
    assert not runner.asked, "nothing is lowered, proposed, tuned, measured or compiled"
    assert b.artifact_files() == a.artifact_files()
    assert b.read("workloads.lock") == a.read("workloads.lock")
    assert [len(b.records(name)) for name in KEPT] == [3, 3, 3]
    if kind == "folder":
        assert all(is_digest(path.name) for path in folder.glob("*/*")), "what a server of files would serve"


def test_a_clone_with_committed_records_gets_objects(machine: Callable[..., Space], server: Server) -> None:
    built(a := machine("a", server.url))
    clone = a.copy_of(a.root.parent / "clone", "cache/record", "workloads.lock")
    _, runner = built(clone, "--locked")
    assert not runner.asked
    assert clone.artifact_files() == a.artifact_files()


def test_what_is_built_from_committed_records_is_shared(machine: Callable[..., Space], server: Server, tmp_path: Path) -> None:
    built(a := machine("a", server.url, "read"))
    assert not server.counts["PUT"]
    built(a.copy_of(tmp_path / "clone", "cache/record"), "--cache", "read-write")
    _, runner = built(b := machine("b", server.url))
    assert not runner.asked
    assert b.artifact_files() == a.artifact_files()


def test_a_null_build_and_a_plan_ask_nobody(machine: Callable[..., Space], server: Server) -> None:
    built(a := machine("a", server.url))
    before = server.counts.total()
    for command in ("build", "plan", "check", "show", "build"):
        assert a.command(command).code == 0
    assert server.counts.total() == before


def test_a_change_is_tuned_once_for_all(machine: Callable[..., Space], warm_server: Server) -> None:
    a, b = (machine(name, warm_server.url) for name in "ab")
    for space in (a, b):
        space.edit("workloads.toml", "n = 64", "n = 128")
    _, runner = built(a)
    assert runner.counts["lower"] == 1
    _, runner = built(b)
    assert not runner.asked
    assert b.artifact_files() == a.artifact_files()


def test_entries_are_written_once(machine: Callable[..., Space], warm_server: Server, warm: Warm) -> None:
    built(machine("b", warm_server.url), "--retune", "*")
    assert warm_server.kept == warm.kept


@pytest.mark.parametrize("mode", ["read", "off"])
def test_nothing_is_written_that_may_only_be_read(mode: str, machine: Callable[..., Space], server: Server) -> None:
    done, _ = built(machine("a", server.url), "--cache", mode)
    assert not server.kept
    assert warnings(done) == []


def test_workers_find_what_others_have_compiled(machine: Callable[..., Space], warm_server: Server, warm: Warm, tmp_path: Path) -> None:
    """A worker knows keys of objects that no plan knows."""
    _, runner = built(changed := machine("a", warm_server.url), "--retune", "*")
    specs = [request["spec"] for request in runner.asked if request["action"] == "build"]
    assert {json.dumps(spec["shared"]) for spec in specs} == {json.dumps({"url": warm_server.url, "trusted": []})}
    compiled = changed.records("build")
    store = store_of_worker(str(tmp_path / "cache"), warm_server.url, ())
    try:
        found = [store.read("build", path.stem, is_local=True) for path in compiled]
    finally:
        store.close()
        store_of_worker.cache_clear()
    assert len(found) == 9
    assert all(isinstance(record, Record) for record in found)
    assert warm_server.kept == warm.kept, "a worker writes nothing"


def test_what_another_build_is_tuning_is_waited_for(machine: Callable[..., Space], warm_server: Server, warm: Warm) -> None:
    """The other one has claimed an entry; its record comes while this one waits."""
    records = {path: warm_server.kept.pop(path) for path in list(warm_server.kept) if path.rpartition("/")[2] in warm.tuned}
    claimed, now = min(records), int(time.time() // 60)
    for slot in range(now - 1, now + 3):
        name = digest(f"claim of {claimed.rpartition('/')[2]} in {slot}".encode())
        warm_server.kept[f"{claimed.rpartition('/')[0]}/{name}"] = b"{}"
    other = threading.Timer(2.0, lambda: warm_server.kept.update({claimed: records[claimed]}))
    other.start()
    done, runner = built(b := machine("b", warm_server.url))
    other.join()
    assert "waiting for 1 entries that other builds are tuning" in done.err
    assert done.err.count("from the shared cache") == 1
    assert runner.counts["describe"] == 2, "the others are tuned here"
    assert b.artifact_files() == warm.artifact


# What a cache can do wrong

FAULTS = {
    "500": "HTTP 500",
    "redirects": "HTTP 302",
    "truncates": "broke off",
    "wrong bytes": "unsound",
    "other entries": "unsound",
    "endless": "sends more than",
}
SLOW_FAULTS = {"hangs": "did not answer", "trickles": "slow"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_cache_that_misbehaves_costs_a_warning(fault: str, machine: Callable[..., Space], warm_server: Server, warm: Warm) -> None:
    _misbehaves(fault, FAULTS[fault], machine, warm_server, warm)


@pytest.mark.slow
@pytest.mark.parametrize("fault", SLOW_FAULTS)
def test_a_cache_that_keeps_builds_waiting_costs_a_warning(
    fault: str, machine: Callable[..., Space], warm_server: Server, warm: Warm
) -> None:
    _misbehaves(fault, SLOW_FAULTS[fault], machine, warm_server, warm)


def _misbehaves(fault: str, words: str, machine: Callable[..., Space], server: Server, warm: Warm) -> None:
    server.fault = fault
    began = time.monotonic()
    done, runner = built(b := machine("b", server.url))
    lost_secs = time.monotonic() - began
    assert runner.asked
    assert b.artifact_files() == warm.artifact
    (warning,) = warnings(done)
    assert words in warning
    assert lost_secs < 10 + 5, "ten for the cache, the rest for a busy machine"
    server.fault = ""
    assert b.command("build").err == "", "and a null build says nothing of it"


@pytest.mark.slow
def test_a_slow_cache_is_used_as_far_as_that_pays(machine: Callable[..., Space], warm_server: Server, warm: Warm) -> None:
    warm_server.fault = "slow"
    _, runner = built(b := machine("b", warm_server.url))
    assert not runner.asked
    assert b.artifact_files() == warm.artifact


def test_a_cache_that_refuses_connections_costs_a_warning(machine: Callable[..., Space], warm: Warm) -> None:
    with serving() as server:
        url = server.url
    done, _ = built(a := machine("a", url))
    assert len(warnings(done)) == 1
    assert "cannot be reached: Connection refused; this build goes on without it" in warnings(done)[0]
    assert a.artifact_files() == warm.artifact


def test_a_cache_that_takes_no_writes_is_read(machine: Callable[..., Space], warm_server: Server) -> None:
    warm_server.fault = "rejects writes"
    b = machine("b", warm_server.url)
    b.edit("workloads.toml", "n = 64", "n = 128")
    done, runner = built(b)
    assert runner.counts["lower"] == 1, "the others come from the cache"
    (warning,) = warnings(done)
    assert "refuses writes (HTTP 403)" in warning
    assert "KERNELDECL_CACHE_TOKEN" in warning


@pytest.mark.parametrize("after", [1, 5])
def test_a_cache_may_disappear_at_any_moment(after: int, machine: Callable[..., Space], warm_server: Server, warm: Warm) -> None:
    warm_server.fault, warm_server.ends_after = "disappears", after
    done, _ = built(b := machine("b", warm_server.url))
    assert b.artifact_files() == warm.artifact
    assert len(warnings(done)) <= 1


def test_a_cache_that_has_lost_blobs_misses(machine: Callable[..., Space], server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerneldecl.store.shared_entry._INLINE_BYTES", 0)
    built(a := machine("a", server.url))
    lost = [path for path in server.kept if "/cas/" in path]
    assert len(lost) == sum(b'"path":"claim"' not in content for content in entries(server).values())
    for path in lost:
        del server.kept[path]
    done, runner = built(b := machine("b", server.url))
    assert runner.counts["lower"] == 3
    assert warnings(done) == []
    assert b.artifact_files() == a.artifact_files()
    _, runner = built(machine("c", server.url))
    assert not runner.asked, "what was lost is there again"


def test_a_required_cache_that_fails_ends_the_build(machine: Callable[..., Space], server: Server) -> None:
    server.fault = "500"
    done = machine("a", server.url, "required").command("build", runner=FakeRunner())
    assert done.code == ExitCode.CACHE
    assert done.err.startswith("error: the shared cache http://127.0.0.1")
    assert done.err.count("\n") == 1
    server.fault = "rejects writes"
    done = machine("b", server.url, "required").command("build", runner=FakeRunner())
    assert done.code == ExitCode.CACHE


def test_a_folder_that_is_not_there_is_no_cache(machine: Callable[..., Space], tmp_path: Path) -> None:
    done, _ = built(machine("a", tmp_path / "nowhere"))
    assert "is no folder; make it, or mount" in warnings(done)[0]
    assert len(warnings(done)) == 1
    assert machine("b", "file:///nonexistent/kerneldecl", "required").command("build", runner=FakeRunner()).code == ExitCode.CACHE


# What others may have written

_MOST_BYTES = 1 << 18


def _edited(content: bytes, edit: Callable[[dict[str, object], list[bytes]], list[bytes]]) -> bytes:
    """Return an entry with its record, as JSON, and its blobs edited, and every digest computed anew."""
    fields = json.loads(content)
    (output,) = fields["outputFiles"]
    rest, parts = zstandard.ZstdDecompressor().decompress(base64.b64decode(output["contents"])), list[bytes]()
    while rest:
        size, _, rest = rest.partition(b"\n")
        parts, rest = [*parts, rest[: int(size)]], rest[int(size) :]
    record = json.loads(parts[0])
    blobs = edit(record["result"], parts[1:])
    record["digest"] = digest(json.dumps(record["result"], sort_keys=True, separators=(",", ":")).encode())
    parts = [json.dumps(record).encode(), *blobs]
    pack = zstandard.ZstdCompressor().compress(b"".join(b"%d\n%b" % (len(part), part) for part in parts))
    output["contents"] = base64.b64encode(pack).decode()
    output["digest"] = {"hash": digest(pack), "sizeBytes": str(len(pack))}
    return json.dumps(fields).encode()


def _bomb(content: bytes) -> bytes:
    fields = json.loads(content)
    pack = zstandard.ZstdCompressor().compress(b"0" * (_MOST_BYTES + 1))
    fields["outputFiles"][0] |= {"contents": base64.b64encode(pack).decode()}
    fields["outputFiles"][0]["digest"] = {"hash": digest(pack), "sizeBytes": str(len(pack))}
    return json.dumps(fields).encode()


def _with(**changed: object) -> Callable[[bytes], bytes]:
    def edit(result: dict[str, object], blobs: list[bytes]) -> list[bytes]:
        if changed.keys() <= result.keys():
            result.update(changed)
        return blobs

    return lambda content: _edited(content, edit)


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "a blob that leads out": _with(object="../../../../etc/passwd"),
    "an object of another digest": _with(object="0" * 64),
    "a symbol of another function": _with(symbol="main"),
    "times that are no numbers": _with(run_secs="fast"),
    "a template that is a path": _with(winner={"template": "../../evil", "params": {}}),
    "other blobs": lambda content: _edited(content, lambda _, blobs: [b"evil" for _ in blobs]),
    "no blobs": lambda content: _edited(content, lambda *_: []),
    "sizes that lie": lambda content: content.replace(b'"sizeBytes": "', b'"sizeBytes": "-').replace(b'"sizeBytes":"', b'"sizeBytes":"-'),
    "a bomb": _bomb,
    "no JSON": lambda _: b"\x00\xff",
    "deep JSON": lambda _: b"[" * 200_000,
    "another's JSON": lambda _: b'{"outputFiles": [{"path": "a.o", "digest": {"hash": "0", "sizeBytes": "1"}}]}',
    "a list": lambda _: b"[1]",
    "a signature that is no text": lambda content: content[:-1] + b',"stdoutRaw":"/w=="}',
}


_SLOW = ("symbol", "times", "template", "no JSON", "another's", "a list", "no blobs")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * any(word in name for word in _SLOW)) for name in HOSTILE])
def test_hostile_entries_are_data(
    name: str, machine: Callable[..., Space], warm_server: Server, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kerneldecl.store.shared_entry.MOST_PACK_BYTES", _MOST_BYTES)
    for path, content in entries(warm_server).items():
        if path.rpartition("/")[2] in warm.tuned:
            warm_server.kept[path] = HOSTILE[name](content)
    hostile = dict(warm_server.kept)
    done, runner = built(b := machine("b", warm_server.url))
    assert b.artifact_files() == warm.artifact
    assert runner.counts["lower"] == 0, "what is sound is taken"
    (warning,) = warnings(done)
    assert "unsound" in warning
    changed = {path for path, content in warm_server.kept.items() if content != hostile.get(path)}
    assert {path.rpartition("/")[2] for path in changed} == warm.tuned, "what was nobody's was replaced, and nothing else"


def test_entries_count_only_if_a_trusted_key_has_signed_them(
    machine: Callable[..., Space], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    ours, theirs = (signing.new_key(tmp_path / name) for name in ("ours.pem", "theirs.pem"))
    assert (tmp_path / "ours.pem").stat().st_mode & 0o777 == 0o600
    trust = f'\n[trust]\nkeys = ["{ours}"]\n'
    monkeypatch.setenv(signing.SIGNING_KEY, str(tmp_path / "theirs.pem"))
    built(machine("asked", server.url))
    done, runner = built(machine("a", server.url, "read", trust))
    assert runner.counts["lower"] == 3
    (warning,) = warnings(done)
    assert "signed by nobody whom trust.keys name" in warning

    server.kept.clear()
    monkeypatch.delenv(signing.SIGNING_KEY)
    built(machine("unsigned", server.url))
    done, runner = built(machine("b", server.url, "read", trust))
    assert runner.counts["lower"] == 3
    assert "not signed" in warnings(done)[0]

    server.kept.clear()
    monkeypatch.setenv(signing.SIGNING_KEY, str(tmp_path / "ours.pem"))
    built(signed := machine("signed", server.url))
    monkeypatch.delenv(signing.SIGNING_KEY)
    done, runner = built(c := machine("c", server.url, "read", f'\n[trust]\nkeys = ["{theirs}", "{ours}"]\n'))
    assert not runner.asked
    assert warnings(done) == []
    assert c.artifact_files() == signed.artifact_files()

    # Signed content under another key: a replay.
    kept = sorted(entries(server))
    contents = [server.kept[path] for path in kept]
    server.kept.update(zip(kept, [*contents[1:], contents[0]], strict=True))
    done, runner = built(machine("d", server.url, "read", trust))
    assert runner.counts["lower"] == 3
    assert len(warnings(done)) == 1


# Credentials


def test_credentials_come_from_the_environment_or_netrc(
    machine: Callable[..., Space], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    built(machine("a", server.url))
    assert {headers["Authorization"] for headers in server.headers} == {f"Basic {base64.b64encode(b'me:secret').decode()}"}
    server.headers.clear()
    monkeypatch.setenv("KERNELDECL_CACHE_TOKEN", "abc")
    monkeypatch.setenv("KERNELDECL_CACHE_HOST", "127.0.0.1")
    built(machine("b", server.url))
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer abc"}


@pytest.mark.parametrize("host", ["", "cache.example.org", "127.0.0.1:1", "127.0.0.1.example.org"])
def test_a_token_goes_to_the_host_that_it_is_for_alone(
    host: str, machine: Callable[..., Space], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone's `[cache]` may name any server."""
    monkeypatch.setenv("KERNELDECL_CACHE_TOKEN", "abc")
    monkeypatch.setenv("KERNELDECL_CACHE_HOST", host)
    built(machine("a", server.url))
    assert server.headers
    assert not any("Authorization" in headers for headers in server.headers)


def test_a_secret_in_the_file_is_a_mistake_that_does_not_repeat_it(machine: Callable[..., Space]) -> None:
    done = machine("a", "https://me:hunter2@cache.example/").command("build")
    assert done.code == ExitCode.USAGE
    assert done.err.startswith("error: workloads.toml:15: [cache]: url holds a user name or a password")
    assert "hunter2" not in done.err


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[cache]\n", "url is missing"),
        ('[cache]\nurl = "ftp://a/b"\n', "expected the URL of a server"),
        ('[cache]\nurl = "http://"\n', "expected the URL of a server"),
        ('[cache]\nurl = "http://a:b"\n', "expected the URL of a server"),
        ('[cache]\nurl = "/a"\nmode = "write"\n', "expected read, read-write or required"),
        ('[cache]\nuri = "/a"\n', 'unknown key "uri"'),
        ("cache = 1\n", "expected a table [cache]"),
        ('[trust]\nkeys = ["abc"]\n', 'expected a list of public keys such as "ed25519:'),
        ("[trust]\n", "keys is missing"),
    ],
)
def test_mistakes_are_sentences(table: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    text = f"edition = 1\n{table}{HEAD.removeprefix('edition = 1')}" if table.startswith("cache") else HEAD + table
    done = Space(tmp_path / "a").write({**FAKES, "workloads.toml": text + ENTRIES}).command("check")
    assert done.code == ExitCode.USAGE
    assert words in done.err


def test_a_build_without_a_cache_cannot_choose_its_mode(fakes: Space) -> None:
    done = fakes.command("build", "--cache", "read")
    assert done.code == ExitCode.USAGE
    assert "declare its url under [cache]" in done.err


# Several at once


@pytest.mark.parametrize("kind", ["folder", "own"])
def test_of_those_who_claim_at_once_one_may_tune(kind: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 8
    monkeypatch.setattr("time.time", lambda: 600.0)
    cache = SharedCache(server.url if kind == "own" else str(tmp_path), "read-write")
    stores = [SharedStore(LocalStore(tmp_path / f"m{index}"), access_to(cache, tmp_path), lambda _: None) for index in range(count)]
    barrier = threading.Barrier(count)

    def claims(store: SharedStore, key: str) -> bool:
        barrier.wait()
        return store.claim(Wanted("tune", key, is_local=False))

    with ThreadPoolExecutor(count) as pool:
        for key in (digest(f"{index}".encode()) for index in range(20)):
            assert sum(pool.map(claims, stores, [key] * count)) == 1
    for store in stores:
        store.close()


def test_a_claim_that_another_replaces_is_given_up(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()

    class Replacing(FolderCache):
        """Keeps the last write, as a server without conditional writes does; another build's comes at once behind ours."""

        def put(self, name: str, content: bytes, *, replaces: bool = False) -> bool:
            assert not replaces
            assert super().put(name, content, replaces=True)
            return super().put(name, another, replaces=True)

    another = shared_entry.entry_text("claim", shared_entry.packed(b"another", ()), "")
    access = Access(lambda: Replacing(folder), str(folder), writes=True)
    store = SharedStore(LocalStore(tmp_path / "own"), access, lambda _: None)
    assert not store.claim(Wanted("tune", digest(b"entry"), is_local=False))
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("kind", ["nginx", "folder"])
def test_concurrent_builds_agree(kind: str, count: int, machine: Callable[..., Space], tmp_path: Path, warm: Warm) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    with nginx(tmp_path / "server") if kind == "nginx" else contextlib.nullcontext(folder) as url:
        script = "import sys; from support.crowd import build; build(sys.argv[1])"
        spaces = [machine(f"m{index}", url) for index in range(count)]
        began = [subprocess.Popen([sys.executable, "-c", script, str(s.root)], env=_with_tests(), stderr=subprocess.PIPE) for s in spaces]
        said = [process.communicate()[1].decode() for process in began]
        assert [process.returncode for process in began] == [0] * count, said
        assert [line for text in said for line in text.splitlines() if line.startswith("the shared cache")] == []
        last = machine("last", url)
        _, runner = built(last)
    assert not runner.asked
    assert all(space.artifact_files() == warm.artifact for space in (*spaces, last))
    tuned = [line for text in said for line in text.splitlines() if line.startswith("tuned") and "from the shared cache" not in line]
    # A server has no writes that fail where there is something: two that ask within the same moment tune the same entry.
    assert len(tuned) == 3 if kind == "folder" else 3 <= len(tuned) < 6, "each entry once, by one of them"


def _with_tests() -> dict[str, str]:
    environment = clean_environment()
    return {**environment, "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests"), environment["PYTHONPATH"]])}
