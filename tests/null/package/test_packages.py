"""Owns the tests of packages: what they say of themselves, whom to believe, and that what was changed is refused."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakeRunner
from support.spaces import Space

from kerneldecl.errors import ArtifactError
from kerneldecl.package.folder import read_package
from kerneldecl.package.statement import MEASURED_ON, PROVENANCE, enveloped, read_envelope
from kerneldecl.package.tar import unpack_tar
from kerneldecl.store.keys import digest
from kerneldecl.store.signing import new_key, signer, verifier

Change = Callable[[Path, Path], object]


def statement(package: Path, name: str) -> Any:
    return json.loads(base64.b64decode(json.loads((package / name).read_text())["payload"]))


def test_a_package_says_what_it_was_built_from_and_on_what_it_was_measured(package: Path, built: Space, public: str) -> None:
    found = read_package(package, verifier([public]))
    assert found.is_trusted
    assert found.signers == (public,)
    said = statement(package, "provenance.json")
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert said["predicateType"] == "https://slsa.dev/provenance/v1"
    files = {str(path.relative_to(package)): digest(path.read_bytes()) for path in package.rglob("*") if path.is_file()}
    assert {each["name"]: each["digest"]["sha256"] for each in said["subject"]} == {
        name: found for name, found in files.items() if name not in {"provenance.json", "measured.json"}
    }
    definition = said["predicate"]["buildDefinition"]
    assert [entry["name"] for entry in definition["externalParameters"]["entries"]] == ["large", "small", "tabled"]
    assert any(each["name"] == "templates.unrolled" for each in definition["resolvedDependencies"])
    measured = statement(package, "measured.json")["predicate"]
    manifest = built.json("dist/fakes-1.0/box/manifest.json")
    assert measured["model"] == manifest["arch"]["model"]
    for said_of, entry in zip(measured["entries"], manifest["entries"], strict=True):
        assert (said_of["name"], said_of["seconds"], said_of["verdict"]) == (entry["name"], entry["run_secs"], entry["verdict"])
        assert said_of["samples"]
        assert said_of["timing"] == "steady"


def test_a_package_is_the_same_bytes_each_time(tar: Path, built: Space, tmp_path: Path) -> None:
    assert built.command("export", "--format", "tar", "-o", str(tmp_path / "again.tar")).code == 0
    assert (tmp_path / "again.tar").read_bytes() == tar.read_bytes()


def test_what_is_signed_is_what_dsse_says(tmp_path: Path) -> None:
    public = new_key(tmp_path / "key.pem")
    envelope = json.loads(enveloped(PROVENANCE, {"a": "0" * 64}, {"x": 1}, signer(tmp_path / "key.pem")))
    payload = base64.b64decode(envelope["payload"])
    kind = envelope["payloadType"]
    # https://github.com/secure-systems-lab/dsse, protocol.md: PAE(type, body)
    encoded = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    (signature,) = envelope["signatures"]
    assert kind == "application/vnd.in-toto+json"
    assert verifier([public])(encoded, f"{signature['keyid']} {signature['sig']}")


def edited(name: str, edit: Callable[[Any], object], *, resigned_by: str = "") -> Change:
    """Edit a statement; sign it anew with a key, or leave the signature of what it was."""

    def change(package: Path, tmp_path: Path) -> None:
        envelope = json.loads((package / name).read_text())
        said = json.loads(base64.b64decode(envelope["payload"]))
        edit(said)
        sign = signer(tmp_path / resigned_by) if resigned_by else None
        fresh = json.loads(enveloped(said["predicateType"], {}, said["predicate"], sign))
        payload = json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
        if sign:
            kind = fresh["payloadType"]
            key, _, signature = sign(f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload).partition(" ")
            envelope["signatures"] = [{"keyid": key, "sig": signature}]
        envelope["payload"] = base64.b64encode(payload).decode()
        (package / name).write_text(json.dumps(envelope))

    return change


def in_file(name: str, old: bytes, new: bytes) -> Change:
    def change(package: Path, _: Path) -> None:
        (path,) = package.glob(name)
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))

    return change


def _first(said: Any) -> Any:
    return said["predicate"]["entries"][0]


def _linked(package: Path, tmp_path: Path) -> None:
    (package / "artifact/manifest.json").rename(tmp_path / "elsewhere.json")
    (package / "artifact/manifest.json").symlink_to(tmp_path / "elsewhere.json")


HOSTILE: Mapping[str, tuple[Change, str]] = {
    "another library": (in_file("artifact/lib/*.so", b"kd_", b"KD_"), "other content"),
    "another manifest": (in_file("artifact/manifest.json", b'"large"', b'"LARGE"'), "other content"),
    "another record": (lambda p, _: next(p.glob("records/ac/*")).write_bytes(b"{}"), "other content"),
    "a file more": (lambda p, _: (p / "artifact/lib/more.so").write_bytes(b""), "not listed"),
    "a module beside it": (lambda p, _: (p / "conftest.py").write_bytes(b""), "not listed"),
    "a file less": (lambda p, _: (p / "artifact/kernels.zip").unlink(), "cannot be read"),
    "a link that leads out": (_linked, "no regular file"),
    "a folder that leads out": (
        lambda p, t: (shutil.move(p / "records", t / "r"), (p / "records").symlink_to(t / "r")),
        "symbolic link|not listed",
    ),
    "no provenance": (lambda p, _: (p / "provenance.json").unlink(), "no package"),
    "no measurements": (lambda p, _: (p / "measured.json").unlink(), "no package"),
    "statements exchanged": (lambda p, _: shutil.copy(p / "measured.json", p / "provenance.json"), "no in-toto statement"),
    "a statement that is no JSON": (lambda p, _: (p / "measured.json").write_text("{"), "no in-toto statement"),
    "a statement nested deeply": (lambda p, _: (p / "measured.json").write_text("[" * 100_000), "no in-toto statement"),
    "a statement that is a list": (lambda p, _: (p / "measured.json").write_text("[]"), "no in-toto statement"),
    "a subject twice": (edited("provenance.json", lambda said: said["subject"].append(said["subject"][0])), "no in-toto statement"),
    "a subject outside": (
        edited("provenance.json", lambda said: said["subject"].append({"name": "../x", "digest": {"sha256": "0" * 64}})),
        "no in-toto statement",
    ),
    "a subject without a digest": (edited("provenance.json", lambda said: said["subject"][0].update(digest={})), "no in-toto statement"),
    "measurements of another artifact": (
        edited("measured.json", lambda said: said["subject"][0]["digest"].update(sha256="0" * 64)),
        "about another artifact",
    ),
    "a faster time": (edited("measured.json", lambda said: _first(said).update(seconds=1e-9)), "other entries, times or verdicts"),
    "a better verdict": (edited("measured.json", lambda said: _first(said).update(verdict={"verified": True})), "other entries, times or"),
    "another device": (edited("measured.json", lambda said: said["predicate"].update(model="NVIDIA B300")), "another device"),
    "no entries": (edited("measured.json", lambda said: said["predicate"].pop("entries")), "lists no entries"),
    "entries that are no tables": (edited("measured.json", lambda said: said["predicate"].update(entries=[1])), "lists no entries"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_package_that_was_changed_is_refused(package: Path, tmp_path: Path, kind: str) -> None:
    change, why = HOSTILE[kind]
    change(package, tmp_path)
    with pytest.raises(ArtifactError, match=why):
        read_package(package, None)


def unsigned(package: Path, _: Path) -> None:
    for name in ("provenance.json", "measured.json"):
        envelope = json.loads((package / name).read_text())
        (package / name).write_text(json.dumps({**envelope, "signatures": []}))


def half_signed(package: Path, _: Path) -> None:
    envelope = json.loads((package / "measured.json").read_text())
    (package / "measured.json").write_text(json.dumps({**envelope, "signatures": []}))


def by_another(name: str) -> Change:
    return edited(name, lambda _: None, resigned_by="other.pem")


def nobody(package: Path, tmp_path: Path) -> None:
    by_another("provenance.json")(package, tmp_path)
    by_another("measured.json")(package, tmp_path)


FORGED: Mapping[str, Change] = {
    "no signature": unsigned,
    "one statement without a signature": half_signed,
    "the signature of somebody else": nobody,
    "one statement by somebody else": by_another("measured.json"),
    "a statement that was edited under its signature": edited("provenance.json", lambda said: said["predicate"].update(more=1)),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_package_that_nobody_trusted_has_signed_is_refused(package: Path, public: str, tmp_path: Path, kind: str) -> None:
    new_key(tmp_path / "other.pem")
    FORGED[kind](package, tmp_path)
    with pytest.raises(ArtifactError, match=r"signed by nobody|is not signed"):
        read_package(package, verifier([public]))
    assert not read_package(package, None).is_trusted  # without a key to check by it is read, and nobody is believed


def test_an_envelope_is_of_one_kind(tmp_path: Path) -> None:
    content = enveloped(MEASURED_ON, {}, {}, None)
    assert read_envelope(content, MEASURED_ON, None).signers == ()
    with pytest.raises(ArtifactError):
        read_envelope(content, PROVENANCE, None)
    assert tmp_path


def test_records_of_a_package_are_those_of_its_entries(built: Space, tar: Path, tmp_path: Path) -> None:
    """An imported package makes a build that runs nothing, and the lock holds what was imported."""
    shutil.copy(tar, built.root.parent / "base.tar")
    other = built.copy_of(tmp_path / "other")
    text = other.read("workloads.toml")
    other.write({"workloads.toml": f'{text}\n[import.base]\nurl = "../base.tar"\n'})
    done = other.command("build")
    assert (done.code, done.links) == (0, 1), done.err
    assert other.artifact_files() == built.artifact_files()
    assert f'[import.base]\nurl = "../base.tar"\ndigest = "sha256:{digest(tar.read_bytes())}"\n' in other.read("workloads.lock")
    assert other.command("build", "--locked").code == 0
    # The lock's digest holds, whatever lies there now.
    (built.root.parent / "base.tar").write_bytes(b"other")
    shutil.rmtree(other.root / "cache")
    assert "expected sha256:" in other.command("build").err


@pytest.mark.parametrize("trusted", [True, False])
def test_an_import_is_signed_by_somebody_who_is_trusted(built: Space, tar: Path, public: str, tmp_path: Path, trusted: bool) -> None:
    key = public if trusted else new_key(tmp_path / "other.pem")
    other = built.copy_of(tmp_path / "other")
    text = other.read("workloads.toml")
    other.write({"workloads.toml": f'{text}\n[import.base]\nurl = "{tar}"\n\n[trust]\nkeys = ["{key}"]\n'})
    done = other.command("build", runner=None if trusted else FakeRunner())
    assert done.code == (0 if trusted else 6), done.err
    if not trusted:
        assert "signed by nobody who is trusted" in done.err
        assert not list((other.root / "cache/import").iterdir())


def test_an_import_that_lies_about_a_kernel_is_not_believed(built: Space, package: Path, tmp_path: Path) -> None:
    """Whoever packs wrong records signs for them; what is no sound record is made here all the same."""
    from kerneldecl.package.folder import MEASURED_FILE, PROVENANCE_FILE, subjects_of
    from kerneldecl.package.tar import write_tar

    for entry in (package / "records/ac").iterdir():
        entry.write_text(entry.read_text().replace('"contents": "', '"contents": "AAAA').replace('"contents":"', '"contents":"AAAA'))
    said = statement(package, PROVENANCE_FILE)
    (package / PROVENANCE_FILE).write_bytes(enveloped(PROVENANCE, subjects_of(package), said["predicate"], None))
    assert (package / MEASURED_FILE).is_file()
    write_tar(package, tmp_path / "lies.tar")
    other = built.copy_of(tmp_path / "other")
    other.write({"workloads.toml": f'{other.read("workloads.toml")}\n[import.base]\nurl = "{tmp_path / "lies.tar"}"\n'})
    runner = FakeRunner()
    done = other.command("build", runner=runner)
    assert done.code == 0, done.err
    assert "unsound entries" in done.err
    assert runner.counts["verify"]
    assert other.artifact_files() == built.artifact_files()


def test_mistakes_of_imports_are_found_with_their_lines(fakes: Space) -> None:
    fakes.write({"workloads.toml": f'{fakes.read("workloads.toml")}\n[import.base]\nurl = "ftp://x/y"\ndigest = "md5:0"\nextra = 1\n'})
    said = fakes.command("check")
    assert said.code == 2
    lines = said.err.splitlines()
    assert len(lines) == 3
    assert all("[import.base]" in line and "workloads.toml:3" in line for line in lines)


def test_other_content_is_not_built_under_a_published_version(built: Space) -> None:
    from kerneldecl.planning.published import note

    note(built.root, built.json("dist/fakes-1.0/box/manifest.json"), "oci://registry.example/fakes:1.0@sha256:0")
    assert built.command("build").code == 0  # nothing is other
    before = built.artifact_files()
    built.edit("workloads.toml", "factor = 3.0", "factor = 5.0")
    refused = built.command("build", runner=FakeRunner())
    assert (refused.code, refused.links) == (2, 0)
    assert "version 1.0 is published with other content for box (oci://registry.example" in refused.err
    assert built.artifact_files() == before
    assert built.command("build", "--overwrite").links == 1  # what was tuned is kept
    built.edit("workloads.toml", 'version = "1.0"', 'version = "1.1"')
    assert built.command("build").code == 0


@pytest.mark.parametrize("command", ["verify", "bench", "diff", "measure"])
@pytest.mark.parametrize("name", ["absent.tar", "absent-1.0-py3-none-linux_x86_64.whl"])
def test_a_file_that_is_not_there_is_named(built: Space, command: str, name: str) -> None:
    done = built.command(command, name)
    assert (done.code, done.err.count("\n")) == (6, 1), done.err
    assert name in done.err


def test_the_package_of_a_stale_artifact_is_not_made(built: Space, tmp_path: Path) -> None:
    built.edit("workloads.toml", "factor = 3.0", "factor = 5.0")
    done = built.command("export", "--format", "tar", "-o", str(tmp_path / "x.tar"))
    assert done.code == 3
    assert "not up to date" in done.err
    assert not (tmp_path / "x.tar").exists()


def test_a_tar_of_a_package_is_its_tar(package: Path, tar: Path, built: Space, tmp_path: Path) -> None:
    assert built.command("export", str(package), "--format", "tar", "-o", str(tmp_path / "again.tar")).code == 0
    assert (tmp_path / "again.tar").read_bytes() == tar.read_bytes()
    (tmp_path / "twice").mkdir()
    unpack_tar(tmp_path / "again.tar", tmp_path / "twice")
    assert read_package(tmp_path / "twice", None).content == read_package(package, None).content
