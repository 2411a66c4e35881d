"""Owns a shared cache in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure; through the library `obstore`.

Knows nothing of what is kept there. It is installed with `kerneldecl[cloud]`. Credentials are those that each cloud's own tools use: of
the environment, of a machine's role; none stands in a URL.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kerneldecl.errors import ToolchainError, printable
from kerneldecl.store.remote import RefusedError, RemoteError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_TIMEOUT = dt.timedelta(seconds=4)
"""Longest wait for an answer; one that a store does not give is asked for again by the shared store's own rule."""


class ObjectCache:
    """One client, with connections of its own."""

    def __init__(self, url: str, *, allow_http: bool = False) -> None:
        """`allow_http` lets the endpoint be one without TLS, which is for this machine alone."""
        self.moved_bytes = 0
        self._store = _opened(url, allow_http)

    def get(self, name: str, most_bytes: int) -> bytes | None:
        import obstore

        with _failing("reads"):
            try:
                found = obstore.get(self._store, name)
            except FileNotFoundError:
                return None
            if found.meta["size"] > most_bytes:
                raise RemoteError(f"sends more than {most_bytes} bytes")
            content = bytes(found.bytes())
        self.moved_bytes += len(content)
        return content

    def has(self, name: str) -> bool:
        import obstore

        with _failing("reads"):
            try:
                obstore.head(self._store, name)
            except FileNotFoundError:
                return False
        return True

    def put(self, name: str, content: bytes, *, replaces: bool = False) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with _failing("writes"):
            try:
                obstore.put(self._store, name, content, mode="overwrite" if replaces else "create", use_multipart=False)
            except AlreadyExistsError:
                return False
        self.moved_bytes += len(content)
        return True

    def abort(self) -> None:
        """A request ends by its own limit of time."""

    def close(self) -> None:
        """Connections end with the client."""


def _opened(url: str, allow_http: bool) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ToolchainError("object stores need the package obstore: pip install 'kerneldecl[cloud]'") from None
    options: dict[str, Any] = {"timeout": _TIMEOUT, "connect_timeout": _TIMEOUT, "allow_http": allow_http}
    retries: Any = {"max_retries": 0, "retry_timeout": _TIMEOUT}
    try:
        return from_url(url, client_options=options, retry_config=retries)  # type: ignore[no-any-return, call-overload]
    except (BaseError, ValueError) as error:
        raise ToolchainError(f"the shared cache {url} cannot be opened: {printable(str(error))[:200]}") from None


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn what goes wrong into a RemoteError, a refusal into a RefusedError."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError, PermissionError):
        raise RefusedError(f"refuses {what}; are the credentials of this cloud in the environment?") from None
    except (BaseError, OSError, ValueError) as error:
        raise RemoteError(f"does not answer {what}: {printable(str(error)).splitlines()[0][:120]}") from None
