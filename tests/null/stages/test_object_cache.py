"""Owns the tests of shared caches in an object store: S3's protocol, spoken by moto on loopback.

Knows nothing of TVM: workspaces are built with fakes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.spaces import ENTRIES, FAKES, HEAD, Space

from kerneldecl.store.object_cache import ObjectCache
from kerneldecl.store.remote import RefusedError, RemoteError

BUCKET = "team"
moto_server = pytest.importorskip("moto.server")
pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have an empty bucket, and credentials for it in the environment."""
    import boto3

    for name, value in {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr("os.fsync", lambda _: None)
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=BUCKET)
    with contextlib.closing(client):
        yield f"s3://{BUCKET}/kernels"
        for each in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
            client.delete_object(Bucket=BUCKET, Key=each["Key"])


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Space]:
    def make(name: str, url: str, mode: str = "read-write") -> Space:
        (tmp_path / name).mkdir()
        table = f'\n[cache]\nurl = "{url}"\nmode = "{mode}"\n'
        return Space(tmp_path / name).write({**FAKES, "workloads.toml": HEAD + table + ENTRIES})

    return make


def test_a_second_machine_tunes_nothing(s3: str, machine: Callable[..., Space]) -> None:
    first, second = machine("first", s3), machine("second", s3, "read")
    assert first.command("build", runner=FakeRunner()).code == 0
    runner = FakeRunner()
    done = second.command("build", runner=runner)
    assert (done.code, done.links, runner.counts) == (0, 1, {}), done.err
    assert second.artifact_files() == first.artifact_files()


def test_a_store_does_what_a_remote_must(s3: str) -> None:
    cache = ObjectCache(s3, allow_http=True)
    assert cache.get("ac/x", 10) is None
    assert not cache.has("ac/x")
    assert cache.put("ac/x", b"first")
    assert not cache.put("ac/x", b"second")
    assert (cache.get("ac/x", 10), cache.has("ac/x")) == (b"first", True), "what is there stays"
    cache.put("ac/x", b"third", replaces=True)
    assert cache.get("ac/x", 10) == b"third"
    with pytest.raises(RemoteError, match="more than 4 bytes"):
        cache.get("ac/x", 4)
    assert cache.moved_bytes >= len(b"firstthird")


def test_without_tls_nobody_is_asked_unless_the_endpoint_is_named_so(s3: str) -> None:
    with pytest.raises(RemoteError):
        ObjectCache(s3).get("ac/x", 10)


def test_a_bucket_that_is_not_there_costs_a_warning(s3: str, machine: Callable[..., Space]) -> None:
    space = machine("first", s3.replace(BUCKET, "nobodys"))
    done = space.command("build", runner=FakeRunner())
    assert (done.code, done.links) == (0, 1)
    assert done.err.count("shared cache s3://nobodys/kernels") == 1, done.err


def test_a_store_that_is_not_there_costs_a_warning_or_the_build(
    s3: str, machine: Callable[..., Space], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        done = machine("first", s3).command("build", runner=FakeRunner())
        assert (done.code, done.links) == (0, 1)
        assert "goes on without it" in done.err
        assert machine("second", s3, "required").command("build", runner=FakeRunner()).code == 11


def test_refusals_are_told_from_failures(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kerneldecl.store import object_cache

    assert s3
    with pytest.raises(RefusedError, match="credentials"), object_cache._failing("reads"):
        raise PermissionError
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    with pytest.raises(RemoteError), object_cache._failing("reads"):
        raise OSError("x\ny")
