"""Owns the tables `[cache]` and `[trust]` of workloads.toml: the cache that several machines share, and whose entries count.

Knows nothing of connections or signatures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from kerneldecl.declare.toml_keys import Finding, Key
from kerneldecl.store.remote import OBJECT_STORES, SharedCache

MODES = ("read", "read-write", "required")
_SCHEMES = ("http", "https", "file", "", *OBJECT_STORES)
_PUBLIC_KEY = re.compile(r"ed25519:[A-Za-z0-9+/]{43}=")


def _is_url(value: object) -> bool:
    if not isinstance(value, str) or not value or not value.isprintable() or value != value.strip():
        return False
    try:
        parts = urlsplit(value)
        parts.port  # noqa: B018  raises ValueError where it is no number
    except ValueError:
        return False
    if parts.scheme not in _SCHEMES or parts.query or parts.fragment:
        return False
    is_server = parts.scheme in {"http", "https", *OBJECT_STORES}
    return bool(parts.hostname) if is_server else not parts.netloc and bool(parts.path)


def are_public_keys(value: object) -> bool:
    """Say whether a value is a list of public keys as TOML and the command line have them."""
    return isinstance(value, list) and all(isinstance(key, str) and _PUBLIC_KEY.fullmatch(key) for key in value)


CACHE: Mapping[str, Key] = {
    "url": Key(
        _is_url,
        "the URL of a server (http, https) or an object store (s3, gs, az), or the path of a folder",
        {"type": "string", "minLength": 1},
        "Where the shared cache is: a server that answers GET, HEAD and PUT below /ac/ and /cas/, an object store, or a folder.",
    ),
    "mode": Key(
        lambda value: isinstance(value, str) and value in MODES,
        f"{', '.join(MODES[:-1])} or {MODES[-1]}",
        {"enum": list(MODES)},
        "What is done with it; read by default. A build ends with exit code 11 where a required one cannot be used.",
    ),
}
TRUST: Mapping[str, Key] = {
    "keys": Key(
        are_public_keys,
        'a list of public keys such as "ed25519:…"',
        {"type": "array", "items": {"type": "string", "pattern": f"^{_PUBLIC_KEY.pattern}$"}},
        "Public keys of those who may write to the shared cache or publish packages; what none of them has signed is ignored, or refused.",
    ),
}


def credentials_in(table: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the mistake of a URL with a user's name or password, without repeating it."""
    url = table.get("url")
    try:
        has_any = isinstance(url, str) and "@" in urlsplit(url).netloc
    except ValueError:
        return
    if has_any:
        way_out = "leave it out, and write a .netrc, or set KERNELDECL_CACHE_HOST with KERNELDECL_CACHE_TOKEN (or _USER and _PASSWORD)"
        yield Finding.of(("url",), "url holds a user name or a password, which everybody can read here", way_out)


def shared_cache_of(cache: Mapping[str, Any], trust: Mapping[str, Any]) -> SharedCache | None:
    """Return the cache of checked tables; None where none is declared."""
    return SharedCache(cache["url"], cache.get("mode", MODES[0]), tuple(trust.get("keys", ()))) if cache else None
