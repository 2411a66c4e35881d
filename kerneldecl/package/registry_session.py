"""Owns the requests to a registry: through `oras`, with bounds on time and size, and credentials for the registry alone.

Knows nothing of packages. Only the content of blobs may lie on another host, to which nothing but the question is sent.
"""

from __future__ import annotations

import contextlib
import http.cookiejar
import ipaddress
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urljoin, urlsplit

import oras.container
import oras.logger
import oras.provider
import requests
import urllib3

from kerneldecl.errors import ArtifactError, RegistryError, printable

if TYPE_CHECKING:
    from kerneldecl.package.registry import Reference

oras.logger.logger.log_handler = []  # errors are raised here, in one sentence
CONNECT_SECS, SILENCE_SECS = 5.0, 20.0
"""Longest wait for a connection, and longest silence in one."""
PATIENCE_SECS = 60.0
"""What an answer may take, besides what a slow network takes for its bytes."""
_BYTES_PER_SEC = 1e5
_CHUNK_BYTES = 1 << 16
_MOST_ANSWER_BYTES = 1 << 20
"""Of what is no blob: tokens, errors."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 3


def is_loopback(host: str) -> bool:
    """Say whether a host is this machine: registries there need no TLS."""
    name = host.strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


class _Session(requests.Session):  # type: ignore[misc]  # requests is untyped
    """Follows nothing, reads no more than it is to, and keeps credentials from other hosts."""

    def __init__(self, registry: str) -> None:
        super().__init__()
        self._registry = registry
        self._responses: list[requests.Response] = []
        self.headers["Accept-Encoding"] = "identity"

    def close(self) -> None:
        """End all connections, those of answers that nobody has read to their end, too."""
        for response in self._responses:
            response.close()
        super().close()

    def request(self, method: str, url: str, *args: Any, **options: Any) -> requests.Response:
        """As requests has it, but for what the class says."""
        stream = options.pop("stream", False)
        headers = dict(options.pop("headers", None) or {})
        if not self._may_know(url):
            headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            self._check_scheme(url)
        options |= {"stream": True, "allow_redirects": False, "timeout": (CONNECT_SECS, SILENCE_SECS)}
        response = super().request(method, url, *args, headers=headers, **options)
        self._responses.append(response)
        if not stream:
            response._content = b"".join(bounded(response, _MOST_ANSWER_BYTES))  # noqa: SLF001  else requests reads whatever comes
        return response

    def _may_know(self, url: str) -> bool:
        """Say whether credentials for the registry may be sent to a URL: of itself, or of its token server under the same domain."""
        asked, own = urlsplit(url), urlsplit(f"//{self._registry}")
        if asked.netloc == own.netloc:
            return asked.scheme == ("http" if is_loopback(own.hostname or "") else "https")
        domain = (own.hostname or "").partition(".")[2]
        is_name = "." in domain and not domain.replace(".", "").isdigit()
        host = asked.hostname or ""
        return is_name and asked.scheme == "https" and asked.port in {None, 443} and (host == domain or host.endswith(f".{domain}"))

    def _check_scheme(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" and not (
            is_loopback(parts.hostname or "") and is_loopback(urlsplit(f"//{self._registry}").hostname or "")
        ):
            raise RegistryError(f"{self._registry} sends elsewhere without TLS, to {printable(parts.hostname or url)[:80]}")


class _Registry(oras.provider.Registry):  # type: ignore[misc]  # oras is untyped
    """Asks once, and once more with a token."""

    def __init__(self, registry: str) -> None:
        host = urlsplit(f"//{registry}").hostname or ""
        super().__init__(hostname=registry, insecure=is_loopback(host))
        self._at = registry
        own = _Session(registry)
        own.cookies.set_policy(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
        self.session = self.auth.session = own

    def do_request(
        self,
        url: str,
        method: str = "GET",
        data: Any = None,
        headers: dict[str, str] | None = None,
        json: Any = None,
        stream: bool = False,
    ) -> requests.Response:
        is_own = urlsplit(url).netloc == self._at
        if not is_own:
            raise RegistryError(f"{self._at} sends an upload to another host, {printable(urlsplit(url).netloc)[:80]}")
        sent = {**(headers or {}), **self.auth.get_auth_header()}
        response = self.session.request(method, url, data=data, json=json, headers=sent, stream=stream)
        if response.status_code in {401, 403} and not sent.get("Authorization", "").startswith("Basic"):
            sent, is_new = self._authenticated(response, dict(headers or {}))
            if is_new:
                response = self.session.request(method, url, data=data, json=json, headers=sent, stream=stream)
        return response

    def _authenticated(self, response: requests.Response, headers: dict[str, str]) -> tuple[dict[str, str], bool]:
        """Return headers with what the registry wants to be sent, and whether there is any."""
        if response.headers.get("Www-Authenticate", "").lower().startswith("basic"):
            known = getattr(self.auth, "_basic_auth", "")
            return headers | ({"Authorization": f"Basic {known}"} if known else {}), bool(known)
        return self.auth.authenticate_request(response, headers, refresh=True)  # type: ignore[no-any-return]  # oras is untyped


class Client:
    """A registry that packages are pulled from and pushed to. Raises RegistryError where it does not do what it is asked."""

    def __init__(self, registry: str) -> None:
        self._registry = _Registry(registry)
        self._name = registry

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._registry.session.close()

    def manifest(self, reference: Reference, accepts: str, most_bytes: int) -> bytes | None:
        """Return the bytes of a manifest, None where there is none."""
        with self._asking():
            at = reference.tag if not reference.digest else f"sha256:{reference.digest}"
            response = self._asked("GET", reference, f"manifests/{at}", {"Accept": accepts})
            if response.status_code == 404:
                return None
            self._check(response, "a manifest")
            return b"".join(bounded(response, most_bytes))

    def blob(self, reference: Reference, blob: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of a blob, from wherever the registry has it; at most so many."""
        with self._asking():
            response = self._asked("GET", reference, f"blobs/sha256:{blob}", {})
            for _ in range(_MOST_REDIRECTS):
                if response.status_code not in _REDIRECTS:
                    break
                url = urljoin(response.url, response.headers.get("Location", ""))
                response = self._registry.session.request("GET", url, headers=self._own_headers(url), stream=True)
            self._check(response, "a blob")
            yield from bounded(response, size)

    def upload(self, reference: Reference, layer: Mapping[str, Any], content: bytes | Path) -> None:
        """Have a blob in the registry."""
        with self._asking(), tempfile.NamedTemporaryFile() as held:
            if isinstance(content, bytes):
                held.write(content)
                held.flush()
            path = content if isinstance(content, Path) else Path(held.name)
            self._check(self._registry.upload_blob(str(path), self._container(reference), dict(layer)), "an upload")

    def put_manifest(self, reference: Reference, kind: str, text: bytes) -> None:
        with self._asking():
            url = f"{self._registry.prefix}://{self._name}/v2/{reference.name}/manifests/{reference.tag}"
            self._check(self._registry.do_request(url, "PUT", data=text, headers={"Content-Type": kind}), "a manifest")

    def _asked(self, method: str, reference: Reference, what: str, headers: Mapping[str, str]) -> requests.Response:
        self._registry.auth.load_configs(self._container(reference), _configurations())
        url = f"{self._registry.prefix}://{self._name}/v2/{reference.name}/{what}"
        return self._registry.do_request(url, method, headers=dict(headers), stream=True)

    def _own_headers(self, url: str) -> dict[str, str]:
        is_own = urlsplit(url).netloc == self._name
        return dict(self._registry.auth.get_auth_header()) if is_own else {}

    def _container(self, reference: Reference) -> Any:
        return oras.container.Container(f"{self._name}/{reference.name}:{reference.tag or 'latest'}")

    def _check(self, response: requests.Response, what: str) -> None:
        if response.status_code in {200, 201, 202}:
            return
        why = "; are the credentials right? (docker login)" if response.status_code in {401, 403} else ""
        raise RegistryError(f"{self._name} answers to {what} with HTTP {response.status_code}{why}")

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn what goes wrong on the way into a RegistryError."""
        try:
            yield
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            if isinstance(error, FileNotFoundError | PermissionError):
                raise
            raise RegistryError(
                f"{self._name} cannot be reached, or broke off ({type(error).__name__}); is that its name, and is it up?"
            ) from None
        except ValueError as error:
            raise RegistryError(f"{self._name} answers what no registry does ({printable(str(error))[:100]})") from None


def _configurations() -> list[str]:
    """Return the file that DOCKER_CONFIG leads to, if it is there; oras itself reads ~/.docker/config.json."""
    named = Path(os.environ.get("DOCKER_CONFIG", "")) / "config.json"
    return [str(named)] if os.environ.get("DOCKER_CONFIG") and named.is_file() else []


def bounded(response: requests.Response, most_bytes: int) -> Iterator[bytes]:
    """Yield an answer's bytes as they came; raise ArtifactError for more than these, RegistryError for one that takes too long."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ArtifactError(f"{urlsplit(response.url).netloc} sends compressed content, which was not asked for")
    began, size = time.monotonic(), 0
    while chunk := response.raw.read1(_CHUNK_BYTES) if hasattr(response.raw, "read1") else response.raw.read(_CHUNK_BYTES):
        size += len(chunk)
        if size > most_bytes:
            raise ArtifactError(f"{urlsplit(response.url).netloc} sends more than the {most_bytes} bytes that it announced or may send")
        if time.monotonic() - began > PATIENCE_SECS + size / _BYTES_PER_SEC:
            raise RegistryError(f"{urlsplit(response.url).netloc} is too slow to be of use")
        yield chunk
