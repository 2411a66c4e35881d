"""Owns servers of shared caches on loopback: nginx, and one of our own that misbehaves in a chosen way.

Knows nothing of what is kept there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from bench_support.nginx import NGINX, serving_nginx


@contextlib.contextmanager
def nginx(root: Path) -> Iterator[str]:
    """Provide the URL of an nginx that keeps what is put into `root/served`; skip where there is none."""
    if not NGINX:
        pytest.skip("nginx is not installed (apt-get install nginx-light)")
    with serving_nginx(root) as url:
        yield url


class Server(ThreadingHTTPServer):
    """Keeps what is put, and answers as its `fault` says; counts requests by method."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kept: dict[str, bytes] = {}
        self.fault = ""
        self.counts: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.ends_after = 0
        """Requests after which the server is gone, if that is its fault."""
        self.open_sockets: set[socket.socket] = set()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/team/a"

    def handle_error(self, *_: object) -> None:
        """A client that breaks off is no news."""

    def vanish(self) -> None:
        """Refuse connections, and break off those that are open."""
        self.socket.close()
        for opened in list(self.open_sockets):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.open_sockets.add(self.connection)

    def finish(self) -> None:
        self.server.open_sockets.discard(self.connection)
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def _arrived(self) -> None:
        server = self.server
        server.counts[self.command] += 1
        server.headers.append(dict(self.headers))
        if server.fault == "hangs":
            server.released.wait(60)
        if server.fault == "disappears" and sum(server.counts.values()) > server.ends_after:
            server.vanish()

    def do_GET(self) -> None:
        self._arrived()
        content = self.server.kept.get(self.path)
        if self.server.fault == "validates entries" and "/ac/" in self.path:
            content = self._validated(content) if content else None
        self._answer(404 if content is None else 200, content or b"")

    def do_HEAD(self) -> None:
        self._arrived()
        self._answer(200 if self.path in self.server.kept else 404, b"")

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self._arrived()
        if self.server.fault == "rejects writes":
            self._answer(403, b"")
        elif self.server.fault == "validates entries":
            self._put_validated(content)
        elif self.headers["If-None-Match"] == "*":  # of requests at once, one is first
            self._answer(201 if self.server.kept.setdefault(self.path, content) is content else 412, b"")
        else:
            self.server.kept[self.path] = content
            self._answer(201, b"")

    def _validated(self, content: bytes) -> bytes | None:
        """Return an entry as bazel-remote 2.6 does: not found where a blob is missing, as JSON only where Accept is exactly that."""
        (output,) = (entry := json.loads(content))["outputFiles"]
        place = self.path.replace("/ac/", "/cas/").rpartition("/")[0] + "/" + output["digest"]["hash"]
        if not output.get("contents") and place not in self.server.kept:
            return None
        entry["executionMetadata"] = {"worker": "127.0.0.1"}
        is_asked_for = self.headers["Accept"] == "application/json"
        return json.dumps(entry, indent=2).encode() if is_asked_for else b"\x0a\x2c\x0a\x04tune"

    def _put_validated(self, content: bytes) -> None:
        """Keep what bazel-remote 2.6 keeps: entries that are JSON and say so, blobs that have their digest; what is there is replaced."""
        name = self.path.rpartition("/")[2]
        if "/ac/" in self.path:
            is_sound = self.headers["Content-Type"] == "application/json" and all(
                each["path"] and len(each["digest"]["hash"]) == 64 for each in json.loads(content)["outputFiles"]
            )
        else:
            is_sound = hashlib.sha256(content).hexdigest() == name
        if is_sound:
            self.server.kept[self.path] = content
        self._answer(200 if is_sound else 400, b"")

    def _answer(self, status: int, content: bytes) -> None:
        fault = self.server.fault
        status = {"500": 500, "redirects": 302}.get(fault, status)
        if content and fault in _EDITS:
            content = _EDITS[fault](self, content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if fault == "redirects":
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()
        if self.command != "HEAD":
            self._send(content)

    def _send(self, content: bytes) -> None:
        size, pause_secs = {"slow": (500, 0.01), "trickles": (1, 0.5)}.get(self.server.fault, (len(content) or 1, 0.0))
        if self.server.fault == "truncates":
            content, self.close_connection = content[: len(content) // 2], True
        for at in range(0, len(content), size):
            time.sleep(pause_secs)
            self.wfile.write(content[at : at + size])


_EDITS: Mapping[str, Callable[[_Handler, bytes], bytes]] = {
    "wrong bytes": lambda _, content: bytes(byte ^ 0x20 for byte in content),
    "other entries": lambda handler, _: next(kept for path, kept in sorted(handler.server.kept.items()) if path != handler.path),
    "endless": lambda *_: b" " * (1 << 22),
}


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Provide a server of our own."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            with contextlib.suppress(OSError, ValueError):
                server.shutdown()
