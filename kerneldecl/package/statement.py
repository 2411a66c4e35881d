"""Owns what a package says of itself: in-toto statements in signed envelopes (DSSE), as other tools for supply chains read them.

Knows nothing of files. An envelope is data that anybody may have written: its types are checked, and a signature is of the
statement's very bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kerneldecl.errors import ArtifactError
from kerneldecl.store.inside import is_digest, is_inner_name
from kerneldecl.store.signing import Sign, Verify

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
MEASURED_ON = "urn:kerneldecl:measured-on:1"
BUILD = "urn:kerneldecl:build:1"
"""What a provenance calls this kind of build: parameters are declared entries, dependencies are plug-ins and tools by digest."""
_PAYLOAD = "application/vnd.in-toto+json"


@dataclass(frozen=True)
class Signed:
    """A statement, and the public keys that its signatures name."""

    subjects: Mapping[str, str]
    """SHA-256 of each file that it is about."""
    predicate: Mapping[str, Any]
    signers: tuple[str, ...]
    is_trusted: bool
    """Whether one of the trusted keys has signed it."""


def enveloped(kind: str, subjects: Mapping[str, str], predicate: Mapping[str, Any], sign: Sign | None) -> bytes:
    """Return the envelope of a statement, signed where there is a key."""
    about = [{"name": name, "digest": {"sha256": found}} for name, found in sorted(subjects.items())]
    statement = {"_type": STATEMENT, "subject": about, "predicateType": kind, "predicate": predicate}
    payload = json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()
    signatures = []
    if sign:
        key, _, signature = sign(_signed_bytes(payload)).partition(" ")
        signatures.append({"keyid": key, "sig": signature})
    envelope = {"payloadType": _PAYLOAD, "payload": base64.b64encode(payload).decode(), "signatures": signatures}
    return (json.dumps(envelope, sort_keys=True) + "\n").encode()


def read_envelope(content: bytes, kind: str, verify: Verify | None) -> Signed:
    """Return the statement of an envelope; raise ArtifactError where it is none of this kind."""
    try:
        envelope = json.loads(content)
        payload = base64.b64decode(envelope["payload"], validate=True)
        lines = [(str(each["keyid"]), str(each["sig"])) for each in envelope["signatures"]]
        statement = json.loads(payload)
        subjects = _subjects(statement["subject"])
        said = (envelope["payloadType"], statement["_type"], statement["predicateType"])
        is_right = said == (_PAYLOAD, STATEMENT, kind) and isinstance(statement["predicate"], dict)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_right = False
    if not is_right:
        raise ArtifactError(f"holds no in-toto statement of {kind}")
    is_trusted = verify is not None and any(verify(_signed_bytes(payload), f"{key} {signature}") for key, signature in lines)
    return Signed(subjects, statement["predicate"], tuple(key for key, _ in lines), is_trusted)


def _subjects(listed: Any) -> dict[str, str]:
    subjects = {str(each["name"]): each["digest"]["sha256"] for each in listed}
    if len(subjects) != len(listed) or not all(map(is_digest, subjects.values())) or not all(map(is_inner_name, subjects)):
        raise ValueError
    return subjects


def _signed_bytes(payload: bytes) -> bytes:
    """Return what is signed of a payload: DSSE's pre-authentication encoding, version 1."""
    return b"DSSEv1 %d %b %d %b" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)
