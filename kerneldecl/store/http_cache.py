"""Owns a shared cache behind HTTP: `GET`, `HEAD` and `PUT` of `/ac/<key>` and `/cas/<digest>`, the layout of Bazel's HTTP cache.

Knows nothing of what is kept there. bazel-remote serves it, nginx with WebDAV, and whatever else keeps what is put. Nothing is followed:
a redirection would carry credentials to wherever a server says.
"""

from __future__ import annotations

import base64
import contextlib
import netrc
import os
import socket
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import SplitResult, urlsplit

from kerneldecl.store.remote import RefusedError, RemoteError

_TIMEOUT_SECS = 4.0
"""Longest silence of a server."""
_CHUNK_BYTES = 1 << 16
_OK = frozenset({200, 201, 202, 204})
_THERE = frozenset({409, 412})
"""What servers answer that keep the first of two."""
_ABSENT = frozenset({404, 410})
_NO_WRITES = frozenset({401, 403, 405, 501})
_PATIENT = frozenset({408, 429})


class HttpCache:
    """One connection, kept alive."""

    def __init__(self, url: str, authorization: str = "") -> None:
        self._parts = urlsplit(url)
        self._authorization = authorization
        self._connection: HTTPConnection | None = None
        self.moved_bytes = 0

    def get(self, name: str, most_bytes: int) -> bytes | None:
        # bazel-remote keeps entries in another form, and gives them back as JSON to those who ask for exactly this and nothing else.
        accepts = {"Accept": "application/json"} if name.startswith("ac/") else {}
        status, content = self._request("GET", name, accepts, most_bytes)
        if status in _ABSENT:
            return None
        _check(status, "reads")
        return content

    def has(self, name: str) -> bool:
        status, _ = self._request("HEAD", name, {}, 0)
        if status not in {*_ABSENT, 405, 501}:
            _check(status, "reads")
        return status in _OK

    def put(self, name: str, content: bytes, *, replaces: bool = False) -> bool:
        kind = "application/json" if name.startswith("ac/") else "application/octet-stream"
        headers = {"Content-Type": kind} | ({} if replaces else {"If-None-Match": "*"})
        status, _ = self._request("PUT", name, headers, _CHUNK_BYTES, content)
        if status not in _THERE | {413}:  # what is too large for a server is not shared
            _check(status, "writes")
        return status not in _THERE

    def abort(self) -> None:
        connection = self._connection
        if connection and (waited := connection.sock):
            with contextlib.suppress(OSError):
                waited.shutdown(socket.SHUT_RDWR)

    def _request(self, method: str, name: str, headers: Mapping[str, str], most_bytes: int, body: bytes | None = None) -> tuple[int, bytes]:
        """Return status and content; a connection that the server has closed meanwhile is opened again, once."""
        was_open = self._connection is not None
        try:
            return self._answered(method, name, headers, most_bytes, body)
        except ConnectionRefusedError:
            self.close()
            raise RemoteError("cannot be reached: Connection refused") from None
        except (ConnectionError, HTTPException) as error:
            self.close()
            if not was_open:
                raise RemoteError(f"broke off ({type(error).__name__})") from None
        except TimeoutError:
            self.close()
            raise RemoteError(f"did not answer within {_TIMEOUT_SECS:g} s") from None
        except (OSError, ValueError) as error:
            self.close()
            raise RemoteError(f"cannot be reached: {getattr(error, 'strerror', '') or error}") from None
        return self._request(method, name, headers, most_bytes, body)

    def _answered(self, method: str, name: str, headers: Mapping[str, str], most_bytes: int, body: bytes | None) -> tuple[int, bytes]:
        connection = self._connection = self._connection or _opened(self._parts)
        authorization = {"Authorization": self._authorization} if self._authorization else {}
        connection.request(method, f"{self._parts.path.rstrip('/')}/{name}", body, {**authorization, **headers})
        self.moved_bytes += len(body or b"")
        response = connection.getresponse()
        content = self._content(response, most_bytes if response.status in _OK else _CHUNK_BYTES)
        if response.will_close:
            self.close()
        return response.status, content

    def _content(self, response: HTTPResponse, most_bytes: int) -> bytes:
        expected = response.length
        chunks, size = list[bytes](), 0
        while chunk := response.read1(_CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            self.moved_bytes += len(chunk)
            if size > most_bytes:
                self.close()
                raise RemoteError(f"sends more than {most_bytes} bytes")
        if expected is not None and size != expected:
            self.close()
            raise RemoteError("broke off in the middle of a file")
        response.close()  # else the connection takes no other request
        return b"".join(chunks)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection:
            connection.close()


def _opened(parts: SplitResult) -> HTTPConnection:
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(str(parts.hostname), parts.port, timeout=_TIMEOUT_SECS)


def _check(status: int, what: str) -> None:
    if status in _OK:
        return
    if status in _NO_WRITES:
        who = "" if status in {405, 501} else "; are the credentials right? (KERNELDECL_CACHE_TOKEN and KERNELDECL_CACHE_HOST, or .netrc)"
        raise RefusedError(f"refuses {what} (HTTP {status}){who}")
    if status < 500 and status not in _PATIENT:
        raise RefusedError(f"answers {what} with HTTP {status}")
    raise RemoteError(f"answers {what} with HTTP {status}")


def authorization_for(url: str, environment: Mapping[str, str]) -> str:
    """Return the header's value for a server: of the environment, else of .netrc; empty where neither has any.

    Both name the host that they are for: a workspace declares the URL, and may be anybody's.
    """
    parts = urlsplit(url)
    named, user, password = environment.get("KERNELDECL_CACHE_HOST", "").lower(), "", ""
    if named and named in {parts.hostname, parts.netloc.lower()}:
        if token := environment.get("KERNELDECL_CACHE_TOKEN"):
            return _one_line(f"Bearer {token}")
        user, password = environment.get("KERNELDECL_CACHE_USER", ""), environment.get("KERNELDECL_CACHE_PASSWORD", "")
    if not user:
        user, password = _of_netrc(parts.hostname or "", environment)
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}" if user else ""


def _one_line(value: str) -> str:
    return "".join(value.split("\n")).strip()


def _of_netrc(host: str, environment: Mapping[str, str]) -> tuple[str, str]:
    try:
        found = netrc.netrc(environment.get("NETRC") or os.path.expanduser("~/.netrc")).authenticators(host)  # noqa: PTH111  as netrc does
    except (OSError, netrc.NetrcParseError):
        return "", ""
    return (found[0], found[2] or "") if found else ("", "")
