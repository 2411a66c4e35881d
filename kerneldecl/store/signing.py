"""Owns signatures of what is shared: Ed25519, made with a key that a file holds, checked against public keys.

Knows nothing of what is signed. The library that computes them is installed with `kerneldecl[trust]`.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kerneldecl.errors import ToolchainError
from kerneldecl.store.inside import UnsafeFileError, read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNING_KEY = "KERNELDECL_SIGNING_KEY"
"""Environment variable with the path of the private key."""
_NAME = "ed25519:"
_MOST_KEY_BYTES = 1 << 12

Sign = Callable[[bytes], str]
Verify = Callable[[bytes, str], bool]


def signer(path: Path) -> Sign:
    """Return what signs with the private key of a file: a line with public key and signature; raise ToolchainError where it holds none."""
    private = _private_key(path)
    public = _shown(private.public_key())
    return lambda message: f"{public} {base64.b64encode(private.sign(message)).decode()}"


def signer_of(environment: Mapping[str, str]) -> Sign | None:
    """Return what signs with the key that the environment names; None where it names none."""
    path = environment.get(SIGNING_KEY, "")
    return signer(Path(path)) if path else None


def verifier(trusted: Collection[str]) -> Verify:
    """Return what says whether a line is the signature of a message by one of these public keys."""
    ed25519 = _library()
    from cryptography.exceptions import InvalidSignature

    keys = {key: ed25519.Ed25519PublicKey.from_public_bytes(base64.b64decode(key.removeprefix(_NAME))) for key in trusted}

    def verify(message: bytes, line: str) -> bool:
        name, _, signature = line.partition(" ")
        try:
            keys[name].verify(base64.b64decode(signature, validate=True), message)
        except (KeyError, ValueError, InvalidSignature):
            return False
        return True

    return verify


def new_key(path: Path) -> str:
    """Write a new private key into a file that only this user can read, and return its public key; raise ToolchainError if it is there."""
    private = _library().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization

    content = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except FileExistsError:
        raise ToolchainError(f"{path} is there already; a key is never replaced: name another file") from None
    return _shown(private.public_key())


def _private_key(path: Path) -> Ed25519PrivateKey:
    ed25519 = _library()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_private_key(read_regular(path, _MOST_KEY_BYTES), None)
    except (OSError, UnsafeFileError) as error:
        raise ToolchainError(f"{SIGNING_KEY} names {path}, which cannot be read: {error}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ToolchainError(f"{path} holds no private Ed25519 key; `kerneldecl cache key FILE` makes one")
    return key  # type: ignore[no-any-return]  # just checked


def _shown(public: Ed25519PublicKey) -> str:
    return _NAME + base64.b64encode(public.public_bytes_raw()).decode()


def _library() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ToolchainError("signatures need the package cryptography: pip install 'kerneldecl[trust]'") from None
    return ed25519
