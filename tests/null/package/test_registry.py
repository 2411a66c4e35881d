"""Owns the tests of packages in registries: a real one takes and gives them, and one that misbehaves harms nobody."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.registries import FAULTS, Registry, docker_registry, logged_in, serving
from support.spaces import Space

from kerneldecl.errors import ArtifactError, RegistryError
from kerneldecl.package import registry_session
from kerneldecl.package.registry import LAYER, look_up, pull, reference_of

REFERENCE = "team/kernels/fakes"


@pytest.fixture
def real(tmp_path: Path) -> Iterator[str]:
    with docker_registry(tmp_path / "registry") as host:
        yield host


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)


def test_what_is_pushed_is_pulled_by_tag_and_by_digest(built: Space, public: str, real: str, tmp_path: Path) -> None:
    pushed = built.command("push", f"oci://{real}/{REFERENCE}")
    assert pushed.code == 0, pushed.err
    reference = pushed.out.splitlines()[0].removeprefix("pushed ")
    assert reference.startswith(f"oci://{real}/{REFERENCE}:1.0@sha256:"), "the version is the tag"
    assert f"signed by {public}" in pushed.out
    assert reference in built.read("published.toml")
    by_tag = built.command("pull", f"oci://{real}/{REFERENCE}:1.0", "-o", str(tmp_path / "one"), "--key", public)
    by_digest = built.command("pull", f"oci://{real}/{REFERENCE}@{reference.partition('@')[2]}", "-o", str(tmp_path / "two"))
    assert (by_tag.code, by_digest.code) == (0, 0), by_tag.err + by_digest.err
    one, two = ({str(p.relative_to(f)): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in (tmp_path / "one", tmp_path / "two"))
    assert one == two
    assert reference in by_tag.out
    assert "whom nothing here says to trust" in by_digest.out
    again = built.command("pull", f"oci://{real}/{REFERENCE}:1.0", "-o", str(tmp_path / "one"))
    assert (again.code, "is there already" in again.err) == (6, True)


def test_a_tag_keeps_its_content_unless_that_is_overwritten(built: Space, real: str, tmp_path: Path) -> None:
    first = built.command("push", f"oci://{real}/{REFERENCE}").out.splitlines()[0].removeprefix("pushed ")
    assert f"is there already: {first}" in built.command("push", f"oci://{real}/{REFERENCE}").out
    built.edit("workloads.toml", "factor = 3.0", "factor = 5.0")
    from support.fakes import FakeRunner

    assert built.command("build", "--overwrite", runner=FakeRunner()).code == 0
    refused = built.command("push", f"oci://{real}/{REFERENCE}")
    assert (refused.code, "published with other content" in refused.err) == (6, True)
    second = built.command("push", f"oci://{real}/{REFERENCE}", "--overwrite").out.splitlines()[0].removeprefix("pushed ")
    assert second != first
    # What is pinned by its digest stays.
    assert built.command("pull", first.replace(":1.0@", "@"), "-o", str(tmp_path / "old")).code == 0


def test_an_import_comes_from_a_registry_once(built: Space, real: str, tmp_path: Path) -> None:
    url = f"oci://{real}/{REFERENCE}:1.0"
    assert built.command("push", url).code == 0
    other = built.copy_of(tmp_path / "other")
    other.write({"workloads.toml": f'{other.read("workloads.toml")}\n[import.base]\nurl = "{url}"\n'})
    done = other.command("build")
    assert (done.code, done.links) == (0, 1), done.err
    assert other.artifact_files() == built.artifact_files()
    assert f'url = "{url}"\ndigest = "sha256:' in other.read("workloads.lock")
    (digest,) = (other.root / "cache/import").iterdir()
    assert digest.name in other.read("workloads.lock")


def test_a_registry_that_is_not_there_is_said_in_one_sentence(built: Space) -> None:
    done = built.command("push", "oci://127.0.0.1:1/team/x")
    assert (done.code, done.err.count("\n")) == (11, 1)
    assert "127.0.0.1:1 cannot be reached" in done.err


def test_what_a_registry_does_not_have(built: Space, real: str) -> None:
    done = built.command("pull", f"oci://{real}/nobody/nothing:1")
    assert (done.code, "has no such package" in done.err) == (6, True)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "oci://",
        "oci://host",
        "oci://host/UPPER:1",
        "oci://host/../x:1",
        "oci://host/x@sha256:0",
        "oci://user:secret@host/x:1",
        "oci://h/a b:1",
    ],
)
def test_what_is_no_reference(text: str, built: Space) -> None:
    with pytest.raises(ValueError, match="is no oci://HOST/NAME:TAG"):
        reference_of(text)
    assert built.command("pull", text).code == 2


# What a registry can do that means harm


@pytest.fixture
def elsewhere() -> Iterator[Registry]:
    with serving() as server:
        yield server


BLOB = b"a package" * 1000


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_session, "SILENCE_SECS", 0.3)
    monkeypatch.setattr(registry_session, "PATIENCE_SECS", 1.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fault", [fault for fault in (*FAULTS, "hangs") if fault != "redirects the blob"])
def test_a_registry_that_misbehaves_leaves_nothing(
    fault: str, registry: Registry, elsewhere: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a tag, but for what only a digest shows; whatever it does, credentials for it go nowhere else."""
    for name, value in logged_in(tmp_path / "docker", registry.host).items():
        monkeypatch.setenv(name, value)
    registry.offer(BLOB)
    registry.fault, registry.elsewhere = fault, elsewhere.host
    pin = f"@sha256:{hashlib.sha256(registry.manifest).hexdigest()}" if "another manifest" in fault else ":1"
    with pytest.raises((ArtifactError, RegistryError)) as raised:
        pull(reference_of(f"oci://{registry.host}/team/x{pin}"), tmp_path / "package.tar")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300
    content = (tmp_path / "package.tar").read_bytes() if (tmp_path / "package.tar").exists() else b""
    assert len(content) <= len(BLOB), "and the folder that it was in is removed"
    assert not any("Authorization" in headers for _, headers in elsewhere.headers)


def test_a_blob_may_lie_elsewhere_and_credentials_stay(
    registry: Registry, elsewhere: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in logged_in(tmp_path / "docker", registry.host).items():
        monkeypatch.setenv(name, value)
    registry.offer(BLOB)
    elsewhere.offer(BLOB)
    registry.fault, registry.elsewhere = "redirects the blob", elsewhere.host
    found = pull(reference_of(f"oci://{registry.host}/team/x:1"), tmp_path / "package.tar")
    assert found.digest == hashlib.sha256(registry.manifest).hexdigest()
    assert (tmp_path / "package.tar").read_bytes() == BLOB
    ((path, headers),) = elsewhere.headers
    assert path == "/blob"
    assert "Authorization" not in headers


def test_credentials_of_docker_login_open_a_registry(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.offer(BLOB)
    registry.fault = "wants a password"
    with pytest.raises(RegistryError, match="HTTP 401; are the credentials right"):
        pull(reference_of(f"oci://{registry.host}/team/x:1"), tmp_path / "refused.tar")
    for name, value in logged_in(tmp_path / "docker", registry.host).items():
        monkeypatch.setenv(name, value)
    pull(reference_of(f"oci://{registry.host}/team/x:1"), tmp_path / "package.tar")
    assert (tmp_path / "package.tar").read_bytes() == BLOB


def test_a_registry_that_wants_a_token_is_one_sentence(
    built: Space, registry: Registry, elsewhere: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.offer(BLOB)
    registry.fault, registry.elsewhere, elsewhere.fault = "asks for a token elsewhere", elsewhere.host, "refuses"
    done = built.command("pull", f"oci://{registry.host}/team/x:1")
    assert (done.code, done.err.count("\n"), done.out) == (11, 1, ""), done.err
    assert not caplog.records, "nor does the library say anything itself"


def test_an_upload_goes_nowhere_else(built: Space, registry: Registry, elsewhere: Registry) -> None:
    registry.elsewhere = elsewhere.host
    registry.fault = "answers 404"
    registry.manifest = b"{}"
    done = built.command("push", f"oci://{registry.host}/team/x:1", "--overwrite")
    assert done.code in {6, 11}
    registry.offer(BLOB)
    done = built.command("push", f"oci://{registry.host}/team/x:1", "--overwrite")
    assert done.code == 11
    assert "sends an upload to another host" in done.err
    assert elsewhere.headers == []


LAYER_OF = {"mediaType": LAYER, "digest": f"sha256:{hashlib.sha256(BLOB).hexdigest()}", "size": len(BLOB)}
LIES: Mapping[str, dict[str, Any]] = {
    "of an index": {"mediaType": "application/vnd.oci.image.index.v1+json"},
    "of another version": {"schemaVersion": 1},
    "without layers": {"layers": []},
    "with two layers": {"layers": [LAYER_OF, LAYER_OF]},
    "with a layer of another type": {"layers": [{**LAYER_OF, "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}]},
    "with layers that are no list": {"layers": {"0": 1}},
    "with a digest that leads out": {"layers": [{**LAYER_OF, "digest": "sha256:../../../etc/passwd"}]},
    "with another algorithm": {"layers": [{**LAYER_OF, "digest": "md5:" + "0" * 32}]},
    "with a negative size": {"layers": [{**LAYER_OF, "size": -1}]},
    "with a size of a petabyte": {"layers": [{**LAYER_OF, "size": 1 << 50}]},
    "with a size in words": {"layers": [{**LAYER_OF, "size": "many"}]},
    "with a size that is true": {"layers": [{**LAYER_OF, "size": True}]},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_names_no_package_is_refused(lie: str, registry: Registry) -> None:
    registry.offer(BLOB, **LIES[lie])
    with pytest.raises(ArtifactError, match="is no package of kerneldecl"):
        look_up(reference_of(f"oci://{registry.host}/team/x:1"))


def test_a_sound_blob_that_is_no_package_leaves_no_folder(built: Space, registry: Registry, tmp_path: Path) -> None:
    registry.offer(BLOB)
    done = built.command("pull", f"oci://{registry.host}/team/x:1", "-o", str(tmp_path / "out/x"))
    assert done.code == 6, done.err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("url", "may"),
    [
        ("https://registry.example.org/v2/", True),
        ("http://registry.example.org/v2/", False),
        ("https://auth.example.org/token", True),
        ("https://example.org/jwt", True),
        ("http://auth.example.org/token", False),
        ("https://auth.example.org:8443/token", False),
        ("https://example.org.evil.net/token", False),
        ("https://evilexample.org/token", False),
        ("https://registry.example.com/token", False),
    ],
)
def test_credentials_stay_within_the_registrys_domain(url: str, may: bool) -> None:
    assert registry_session._Session("registry.example.org")._may_know(url) is may


@pytest.mark.parametrize(
    ("registry_host", "url"), [("ghcr.io", "https://evil.io/"), ("10.0.0.1:5000", "https://10.0.0.2/"), ("[::1]:5000", "https://[::2]/")]
)
def test_a_short_name_or_an_address_has_no_domain(registry_host: str, url: str) -> None:
    assert not registry_session._Session(registry_host)._may_know(url)
