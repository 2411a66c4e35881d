"""Owns registries on loopback: docker-registry, and one of our own that misbehaves in a chosen way.

Knows nothing of packages.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kerneldecl.package.registry import LAYER

DOCKER_REGISTRY = shutil.which("docker-registry")
_CONFIGURATION = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {root}/kept}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextlib.contextmanager
def docker_registry(root: Path) -> Iterator[str]:
    """Provide host and port of a docker-registry; skip where there is none."""
    if not DOCKER_REGISTRY:
        pytest.skip("docker-registry is not installed (apt-get install docker-registry)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    root.mkdir(parents=True)
    (root / "registry.yml").write_text(_CONFIGURATION.format(root=root, port=port), encoding="utf-8")
    with subprocess.Popen([DOCKER_REGISTRY, "serve", str(root / "registry.yml")], stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_for(port: int) -> None:
    for _ in range(500):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise TimeoutError("docker-registry does not start")


_PASSWORD = base64.b64encode(b"team:secret").decode()


class Registry(ThreadingHTTPServer):
    """Has one package, and gives it out as its `fault` says; notes the headers of each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fault = ""
        self.blob = b""
        self.manifest = b""
        self.elsewhere = ""
        """Host and port of another server, for redirections."""
        self.headers: list[tuple[str, dict[str, str]]] = []
        self.released = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def offer(self, blob: bytes, **changes: object) -> None:
        """Have a package, its manifest changed in these fields."""
        layer = {"mediaType": LAYER, "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}
        manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": [layer], **changes}
        self.blob, self.manifest = blob, json.dumps(manifest).encode()

    def handle_error(self, *_: object) -> None:
        """A client that breaks off is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.headers.append((self.path, dict(self.headers)))
        if server.fault == "hangs":
            server.released.wait(30)
        is_manifest = "/manifests/" in self.path
        if server.fault == "wants a password" and self.headers["Authorization"] != f"Basic {_PASSWORD}":
            self.answer(401, b"", WWW_Authenticate='Basic realm="kernels"')
            return
        if server.fault in _ANSWERS and (is_manifest == _ANSWERS[server.fault][0]):
            _ANSWERS[server.fault][1](self)
        else:
            self.answer(200, server.manifest if is_manifest else server.blob)

    def do_HEAD(self) -> None:
        self.answer(404, b"")

    def do_POST(self) -> None:
        self.server.headers.append((self.path, dict(self.headers)))
        self.answer(202, b"", Location=f"http://{self.server.elsewhere}/upload")

    def answer(self, status: int, content: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _cut(handler: _Handler) -> None:
    blob = handler.server.blob
    handler.answer(200, blob[: len(blob) // 2], len(blob))
    handler.close_connection = True


def _token(handler: _Handler) -> None:
    challenge = f'Bearer realm="http://{handler.server.elsewhere}/token",service="kernels",scope="repository:team/x:pull"'
    handler.answer(401, b"", WWW_Authenticate=challenge)


_ANSWERS: Mapping[str, tuple[bool, Callable[[_Handler], None]]] = {
    "sends another manifest than asked for": (True, lambda each: each.answer(200, each.server.manifest + b" ")),
    "sends an endless manifest": (True, lambda each: each.answer(200, b" " * (2 << 20))),
    "sends a manifest that is no JSON": (True, lambda each: each.answer(200, b"<html>")),
    "sends JSON nested a million deep": (True, lambda each: each.answer(200, b"[" * 1_000_000)),
    "sends a compressed manifest": (True, lambda each: each.answer(200, gzip.compress(each.server.manifest), Content_Encoding="gzip")),
    "redirects the manifest": (True, lambda each: each.answer(302, b"", Location=f"http://{each.server.elsewhere}/x")),
    "asks for a token elsewhere": (True, _token),
    "answers 500": (True, lambda each: each.answer(500, b"out of order")),
    "refuses": (False, lambda each: each.answer(403, b"{}")),
    "sends other content": (False, lambda each: each.answer(200, _flipped(each.server.blob))),
    "sends half": (False, lambda each: each.answer(200, each.server.blob[: len(each.server.blob) // 2])),
    "breaks off": (False, _cut),
    "sends more than it announced": (False, lambda each: each.answer(200, each.server.blob + b"more")),
    "sends a compressed blob": (False, lambda each: each.answer(200, gzip.compress(bytes(1 << 20)), Content_Encoding="gzip")),
    "redirects the blob": (False, lambda each: each.answer(307, b"", Location=f"http://{each.server.elsewhere}/blob")),
    "redirects in a circle": (False, lambda each: each.answer(307, b"", Location=each.path)),
    "redirects to a file": (False, lambda each: each.answer(307, b"", Location="file:///etc/passwd")),
    "redirects to another network": (False, lambda each: each.answer(307, b"", Location="http://registry.invalid/blob")),
}
FAULTS = tuple(_ANSWERS)


@contextlib.contextmanager
def serving() -> Iterator[Registry]:
    """Provide a registry of our own."""
    with Registry() as registry:
        thread = threading.Thread(target=registry.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            registry.released.set()
            registry.shutdown()


def logged_in(folder: Path, *hosts: str) -> dict[str, str]:
    """Write a configuration of docker with credentials for hosts, and return the environment that names it."""
    folder.mkdir(exist_ok=True)
    auths = {host: {"auth": _PASSWORD} for host in hosts}
    (folder / "config.json").write_text(json.dumps({"auths": auths}), encoding="utf-8")
    return {"DOCKER_CONFIG": str(folder)}
