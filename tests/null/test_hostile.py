"""Owns the table of hostile artifacts, stores and bundles: each is refused before anything of it is loaded or run.

Knows nothing of damage by accident (test_link, test_local, test_mutants). Who wrote these computed every digest anew. A canary lies
outside, which the kernel watches: nothing may read it, write beside it or remove it.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.canary import Canary
from support.fakes import FakeRunner
from support.mutants import make_pristine
from support.spaces import Space

from kerneldecl.artifact import kernels
from kerneldecl.artifact.archive import ARCHIVE, read_member
from kerneldecl.artifact.load import load
from kerneldecl.artifact.manifest import with_digest
from kerneldecl.cli import verify
from kerneldecl.errors import ArtifactError, ExitCode
from kerneldecl.planning.plan import VERIFYING
from kerneldecl.store.inside import MOST_BYTES
from kerneldecl.store.keys import digest, key
from kerneldecl.store.local import LocalStore, Miss, Record, store_stats
from kerneldecl.timing import measuring
from kerneldecl.tuning import bundle

Json = dict[str, Any]
Edit = Callable[[Json, Path, Path], object]
"""Makes a manifest or a bundle hostile: its JSON, its folder, the canary's secret."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Space:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        return make_pristine(tmp_path_factory.mktemp("hostile") / "pristine")


@pytest.fixture
def hostile(pristine: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    monkeypatch.setattr("os.fsync", lambda _: None)
    shutil.copytree(pristine.root, tmp_path / "hostile")
    return Space(tmp_path / "hostile")


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    with Canary(tmp_path / "canary") as watched:
        yield watched


def entry(**fields: object) -> Edit:
    return lambda found, *_: found["entries"][0].update(fields)


def field(name: str, value: object) -> Edit:
    return lambda found, *_: found.update({name: value})


def listed(name: str, content_digest: object = "0" * 64) -> Edit:
    return lambda found, *_: found["files"].update({name: content_digest})


def unlisted(name: str) -> Edit:
    return lambda found, *_: found["files"].pop(name or found["library"])


def with_library(found: Json, secret: Path, name: str) -> None:
    """Have a library outside, listed with its right digest."""
    found["library"] = name
    found["files"][name] = digest(b"secret")
    del secret


def replaced(name: str, make: Callable[[Path, Path], object]) -> Edit:
    """Put something else in the place of a file or folder of the artifact; `make` gets its path and the secret's."""

    def edit(found: Json, folder: Path, secret: Path) -> None:
        path = folder / (name or found["library"])
        kept = path.with_name(f"{path.name}.kept")
        path.rename(kept)
        make(path, secret)

    return edit


def sparse(path: Path, _: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)


def link_to_own_copy(path: Path, secret: Path) -> None:
    """Link to what has the right content, but lies outside."""
    outside = secret.parent / "copy"
    kept = path.with_name(f"{path.name}.kept")
    shutil.move(kept, outside)
    path.symlink_to(outside)


ARTIFACTS: Mapping[str, Edit] = {
    "library by an absolute path": lambda found, _, secret: with_library(found, secret, str(secret)),
    "library by dots": lambda found, _, secret: with_library(found, secret, f"../../../../canary/{secret.name}"),
    "library that is not listed": unlisted(""),
    "library of another type": field("library", ["lib/x.so"]),
    "library behind a link": replaced("", lambda path, secret: path.symlink_to(secret)),
    "library behind a link to the right bytes": replaced("", link_to_own_copy),
    "folder of libraries behind a link": replaced("lib", link_to_own_copy),
    "database behind a link": replaced("database", link_to_own_copy),
    "library that is a folder": replaced("", lambda path, _: path.mkdir()),
    "library that is a pipe": replaced("", lambda path, _: os.mkfifo(path)),
    "library that is a device": replaced("", lambda path, _: path.symlink_to("/dev/zero")),
    "library larger than any": replaced("", sparse),
    "file that is a device": listed("/dev/zero"),
    "file that is a pipe": lambda found, folder, _: (os.mkfifo(folder / "pipe"), listed("pipe")(found, folder, folder)),
    "file by an absolute path": lambda found, _, secret: found["files"].update({str(secret): digest(b"secret")}),
    "file by dots": lambda found, _, secret: found["files"].update({f"../../../../canary/{secret.name}": digest(b"secret")}),
    "file by dots inside": listed("lib/../manifest.json"),
    "file with an empty part": listed("lib//x"),
    "file named by a dot": listed("."),
    "file without a name": listed(""),
    "file with a zero byte": listed("lib/\0x"),
    "file with an escape sequence": listed("lib/\x1b]0;owned\x07"),
    "file with a line end": listed("lib/x\nok everything"),
    "file with a long name": listed("x" * 5000),
    "file that is not there": listed("lib/none.so"),
    "digest of another type": listed("lib/x", 7),
    "digest that is a path": listed("lib/x", "/etc/passwd"),
    "files that are a list": field("files", ["lib/x"]),
    "archive that is not listed": unlisted(ARCHIVE),
    "database that is not listed": unlisted("database/database_workload.json"),
    "function without a trace outside": entry(traceless="../../../../canary/secret.txt"),
    "function without a trace that is not listed": lambda found, *_: found["entries"][0].update(
        traceless=f"traceless/{found['entries'][0]['computation']}.json"
    ),
    "symbol that is an absolute path": entry(symbol="/tmp/x"),
    "symbol that leads out": entry(symbol="../../x"),
    "symbol of another type": entry(symbol=["kd_"]),
    "computation that leads out": entry(computation="../../x"),
    "entries that are no list": field("entries", {"a": 1}),
    "entry that is no table": field("entries", ["act"]),
    "entry without a name": lambda found, *_: found["entries"][0].pop("name"),
    "entry with attributes that are no table": entry(attrs=[1]),
    "winner that is a text": entry(winner="cpu_matmul"),
    "verdict without a tolerance": entry(verdict={"tolerance": "inf"}),
    "arch that is missing": lambda found, *_: found.pop("arch"),
    "arch of another kind": lambda found, *_: found["arch"].update(kind="rocm"),
    "arch with so many cores": lambda found, *_: found["arch"].update(cpu={"cores": "two"}),
    "missing that is no table": field("missing", ["x"]),
    "missing without reasons": field("missing", {"x": None}),
    "schema of another type": field("schema", {"a": [5]}),
    "toolchain that is no table": field("toolchain", [[]]),
}


@pytest.mark.parametrize("name", ARTIFACTS)
def test_a_hostile_artifact_is_refused_before_anything_is_loaded(
    hostile: Space, canary: Canary, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "load_library", _must_not_load)
    folder = hostile.artifact("box")
    manifest = json.loads((folder / "manifest.json").read_text())
    ARTIFACTS[name](manifest, folder, canary.secret)
    (folder / "manifest.json").write_bytes(with_digest(manifest))
    canary.is_touched()
    with pytest.raises(ArtifactError, match="build it again") as caught:
        load(folder)
    assert str(caught.value).isprintable()
    assert not canary.is_touched()


def _must_not_load(*_: object) -> None:
    raise AssertionError("code was loaded")


FILES: Mapping[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, secret: path.symlink_to(secret),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a device": lambda path, _: path.symlink_to("/dev/zero"),
    "a folder": lambda path, _: path.mkdir(),
    "larger than any": sparse,
    "nested deeply": lambda path, _: path.write_text("[" * 100_000),
    "a number without end": lambda path, _: path.write_text('{"schema": ' + "9" * 5000 + "}"),
    "no UTF-8": lambda path, _: path.write_bytes(b"\xff\xfe"),
}
"""What may stand in the place of a manifest, a bundle's JSON or a record."""


@pytest.mark.parametrize("what", FILES)
def test_what_stands_in_the_place_of_a_manifest_or_a_bundle_is_not_read(hostile: Space, canary: Canary, what: str) -> None:
    (bundled,) = (hostile.root / "dist").glob("*/gpu.bundle")
    for path in (hostile.artifact("box") / "manifest.json", bundled / "bundle.json"):
        path.unlink()
        FILES[what](path, canary.secret)
    canary.is_touched()
    with pytest.raises(ArtifactError):
        load(hostile.artifact("box"))
    with pytest.raises(ArtifactError, match=r"bundle\.json"):
        bundle.read_bundle(bundled)
    assert not canary.is_touched()


def test_an_archive_whose_parts_are_larger_than_itself_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("kd_0.o", bytes(1 << 24))
    with pytest.raises(ArtifactError, match="is compressed"):
        read_member(tmp_path / ARCHIVE, "kd_0.o")
    with pytest.raises(ArtifactError, match="has no kd_1"):
        read_member(tmp_path / ARCHIVE, "kd_1.o")


# Stores


def signed(path: Path, result: object) -> None:
    record = json.loads(path.read_text())
    body = json.dumps(result, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**record, "result": result, "digest": digest(body.encode())}))


RECORDS: Mapping[str, tuple[str, str, object]] = {
    "object that is an absolute path": ("tune", "object", "{secret}"),
    "object that leads out": ("tune", "object", "../../../../canary/secret.txt"),
    "source that leads out": ("tune", "source", "../../../../canary/secret.txt"),
    "symbol that is an absolute path": ("tune", "symbol", "{secret}"),
    "symbol of another computation": ("tune", "symbol", "kd_" + "0" * 20),
    "computation that leads out": ("tune", "computation", "../../../../canary/secret.txt"),
    "template that leads out": ("tune", "winner", {"template": "../../canary/secret", "params": {}}),
    "winner that is a text": ("tune", "winner", "unrolled"),
    "time that is a text": ("tune", "run_secs", "fast"),
    "time that is no number": ("tune", "run_secs", float("nan")),
    "error that is a text": ("tune", "error", "none"),
    "ties that are negative": ("tune", "tied", -1),
    "trials that are no list": ("tune", "trials", {"a": 1}),
    "provenance of lists": ("tune", "provenance", {"host": ["a"]}),
    "signature without shapes": ("lower", "signature", {"inputs": [{"name": "X"}], "outputs": []}),
    "signature of negative extents": ("lower", "signature", {"inputs": [], "outputs": [{"name": "Y", "dtype": "float32", "shape": [-1]}]}),
    "space that is a list": ("lower", "space", []),
    "work that is a text": ("lower", "flops", "many"),
    "samples of texts": ("measure", "samples", ["fast"]),
    "failure that is none": ("measure", "failure", None),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_hostile_record_is_a_miss_that_leads_nowhere(hostile: Space, canary: Canary, name: str) -> None:
    kind, wanted, value = RECORDS[name]
    path = hostile.records(kind)[0]
    result = json.loads(path.read_text())["result"]
    given = str(canary.secret) if value == "{secret}" else value
    signed(path, {**result, wanted: given})
    found = LocalStore(hostile.root / "cache").read(kind, path.stem, is_local=False)
    assert isinstance(found, Miss)
    assert f"has no {wanted}" in found.reason
    for arguments in (("plan", "*"), ("show",), ("cache", "stats"), ("build", "--locked"), ("build",)):
        done = hostile.command(*arguments, runner=FakeRunner())
        assert done.code in {0, 3}, done.err
    assert not canary.is_touched()
    is_remade = isinstance(LocalStore(hostile.root / "cache").read(kind, path.stem, is_local=False), Record)
    assert is_remade == (kind != "measure"), "nobody asks for a measurement while its tuning is known"


@pytest.mark.parametrize("what", FILES)
def test_what_stands_in_the_place_of_a_record_or_a_blob_is_a_miss(hostile: Space, canary: Canary, what: str) -> None:
    store = LocalStore(hostile.root / "cache")
    record, blob = hostile.records("tune")[0], next(iter((hostile.root / "cache/blob").glob("*/*")))
    for path in (record, blob):
        path.unlink()
        FILES[what](path, canary.secret)
    canary.is_touched()
    assert isinstance(store.read("tune", record.stem, is_local=False), Miss)
    assert isinstance(store.read_blob(blob.name), Miss)
    assert len(store_stats(store)["damaged"]) in {1, 2}  # a blob that is read is removed
    assert not canary.is_touched()


@pytest.mark.parametrize("name", ["../../canary/secret.txt", "/etc/passwd", "", "..", "0" * 63, "G" * 64, "0" * 64 + "/x"])
def test_nothing_but_a_digest_names_a_record_or_a_blob(hostile: Space, canary: Canary, name: str) -> None:
    store = LocalStore(hostile.root / "cache")
    for asked in (name, str(canary.secret)):
        assert isinstance(store.read("tune", asked, is_local=False), Miss)
        assert isinstance(store.read_blob(asked), Miss)
        assert not store.blobs_there()(asked)
    assert not canary.is_touched()


# Bundles


def candidate(**fields: object) -> Edit:
    return lambda found, *_: found["entries"][0]["groups"][0]["candidates"][0].update(fields)


def stray(name: str, text: str = "raise SystemExit('it ran')\n") -> Edit:
    def edit(_: Json, folder: Path, __: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return edit


def in_part(part: str, **fields: object) -> Edit:
    return lambda found, *_: found["entries"][0][part].update(fields)


def figure(name: str, value: object) -> Edit:
    return lambda found, *_: found["entries"][0]["arch"]["gpu"].update({name: value})


BUNDLES: Mapping[str, Edit] = {
    "library by dots": candidate(code_digest="../../../../canary/secret"),
    "library by an absolute path": candidate(code_digest="/tmp/evil"),
    "library that is not there": candidate(code_digest="0" * 64),
    "library of other content": lambda _, folder, __: next(folder.glob("lib/*.so")).write_bytes(b"other"),
    "library behind a link": lambda _, folder, secret: (path := next(folder.glob("lib/*.so")), path.unlink(), path.symlink_to(secret)),
    "libraries behind a link": lambda _, folder, secret: (
        shutil.move(folder / "lib", secret.parent / "lib"),
        (folder / "lib").symlink_to(secret.parent / "lib"),
    ),
    "file by dots": listed("../../../canary/secret.txt", digest(b"secret")),
    "file that is a device": listed("/dev/zero"),
    "rule that is not listed": stray("rules/elementwise.py"),
    "neighbour of a rule that is not listed": stray("rules/shared/__init__.py"),
    "module beside the bundle's JSON": stray("numpy.py"),
    "files that are missing": lambda found, *_: found.pop("files"),
    "entries that are no list": field("entries", {"a": 1}),
    "entry that is no table": field("entries", [7]),
    "entry without a workload": lambda found, *_: found["entries"][0].pop("workload"),
    "workload with an unknown field": in_part("workload", more=1),
    "workload with a number for a name": in_part("workload", name=7),
    "workload with a target of another type": in_part("workload", target=None),
    "computation that leads out": in_part("lowered", computation="../../../canary/secret"),
    "space without blocks": in_part("lowered", space={}),
    "space of other types": in_part("lowered", space={"blocks": [], "inputs": [1], "outputs": []}),
    "arch that is detected": in_part("arch", is_detected=True),
    "arch that is a CPU": in_part("arch", kind="cpu"),
    "arch of a CPU": in_part("arch", kind="cpu", gpu=None),
    "arch of other figures": figure("l2_bytes", "many"),
    "arch with an unknown figure": figure("evil", 1),
    "toolchain that is a list": lambda found, *_: found["entries"][0].update(toolchain=[]),
    "toolchain without a compiler": lambda found, *_: found["entries"][0]["toolchain"].pop("cuda"),
    "groups that are none": lambda found, *_: found["entries"][0].update(groups=None),
    "policy of another type": lambda found, *_: found["entries"][0]["groups"][0].update(policy=7),
    "candidate without blobs": lambda found, *_: found["entries"][0]["groups"][0]["candidates"][0].pop("blobs"),
    "blobs that lead out": candidate(blobs={"object": "../x", "database": "../x", "source": "../x"}),
    "blobs that are missing": candidate(blobs={}),
    "candidate of another type": candidate(candidate="unrolled"),
    "samples of texts": candidate(samples=["fast"]),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_hostile_bundle_is_refused_before_anything_runs(hostile: Space, canary: Canary, name: str) -> None:
    (folder,) = (hostile.root / "dist").glob("*/gpu.bundle")
    content = json.loads((folder / "bundle.json").read_text())
    BUNDLES[name](content, folder, canary.secret)
    (folder / "bundle.json").write_text(json.dumps(content))
    canary.is_touched()
    with pytest.raises(ArtifactError, match="--no-measure") as caught:
        bundle.read_bundle(folder)
    assert str(caught.value).isprintable()
    assert not canary.is_touched()
    done = hostile.command("measure", str(folder))
    assert (done.code, done.out) == (6, "")


def test_a_bundle_names_no_key(hostile: Space) -> None:
    """What it says of keys, protocol and tolerance is not looked at: those of another entry cannot be filled."""
    (folder,) = (hostile.root / "dist").glob("*/gpu.bundle")
    before = [key(entry.manifest) for entry in bundle.read_bundle(folder)]
    content = json.loads((folder / "bundle.json").read_text())
    for each in content["entries"]:
        each.update(manifest=['action = "tune"'], key="0" * 64, protocol="none", seed=1, tolerance=1e9)
    (folder / "bundle.json").write_text(json.dumps(content))
    entries = bundle.read_bundle(folder)
    assert [key(entry.manifest) for entry in entries] == before
    assert {entry.task.tolerance for entry in entries} == {1e-4}
    assert {(entry.task.protocol, entry.task.seed) for entry in entries} == {(measuring("cuda"), VERIFYING["seed"])}


def test_a_bundles_rules_run_only_where_they_are_trusted(hostile: Space) -> None:
    (folder,) = (hostile.root / "dist").glob("*/gpu.bundle")
    entries = bundle.read_bundle(folder)
    assert all((folder / f"computation/{entry.task.lowered.computation}.json").is_file() for entry in entries)
    for entry in bundle.with_trusted_references(entries, FakeRunner()):
        spec, workload = entry.task.measured_spec, entry.task.workload
        assert (spec["rule"], spec["attrs"]) == (workload.rule, dict(workload.attrs))
    for path in folder.glob("computation/*"):
        path.unlink()
    with pytest.raises(ArtifactError, match="--trust-rules runs its rules instead"):
        bundle.with_trusted_references(entries, FakeRunner())


def test_the_table_has_as_many_kinds_as_it_is_said_to() -> None:
    assert len(ARTIFACTS) + len(FILES) * 2 + len(RECORDS) + len(BUNDLES) >= 60


def test_an_entry_whose_reference_is_nowhere_is_not_called_wrong() -> None:
    held = {"name": "own", "rule": "tripled", "verdict": {"tolerance": 1e-4}, "symbol": "kd_0"}
    verdict = verify._verdict(held, {}, {"failure": "ValueError: it is not here"}, None)  # type: ignore[arg-type]  # no runner is asked
    assert verify._exit_code([verdict]) == ExitCode.FAILED
    found = {"artifact": "dist/box", "defect": "", "entries": [verdict], "missing": {}}
    text = verify.verify_text({"artifacts": [found]})
    assert "not checked  own  its rule is not here" in text
    assert "0 of 1 kernels correct, 1 not checked" in text
    assert "WRONG" not in text
    right, wrong = ({**verdict, "checked": True, "ok": ok} for ok in (True, False))
    assert [verify._exit_code(several) for several in ([right], [right, verdict], [verdict, wrong])] == [0, 1, 7]
