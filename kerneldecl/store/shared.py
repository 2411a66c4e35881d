"""Owns the store of a workspace that shares what it finds out: the local store, and behind it a cache that several machines use.

Knows nothing of how that cache is reached, or of what records mean. What it gives is data that anybody may have written: it enters the
local store by the same checks that a record there must pass, and only with all its blobs. A key that the cache lacks is not asked for
again, unless somebody wants to know anew.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kerneldecl.errors import CacheError
from kerneldecl.store import shared_entry, signing
from kerneldecl.store.connections import Connections, Patience
from kerneldecl.store.files import write_whole
from kerneldecl.store.folder_cache import FolderCache
from kerneldecl.store.inside import UnsafeFileError, is_digest, read_regular
from kerneldecl.store.keys import digest
from kerneldecl.store.local import LocalStore, Miss, Record, judged
from kerneldecl.store.protocol import Wanted
from kerneldecl.store.record_text import Result
from kerneldecl.store.remote import OBJECT_STORES, Remote, SharedCache
from kerneldecl.store.shared_entry import KINDS, EntryError

Say = Callable[[str], None]
_READ_ALONE = frozenset({"measure", "build", "cubin"})
"""Kinds whose keys turn up one by one. What plans read is fetched for all entries at once, between two plans."""


@dataclass(frozen=True)
class Access:
    """How a shared cache is used."""

    connect: Callable[[], Remote]
    url: str
    writes: bool = False
    is_required: bool = False
    verify: signing.Verify | None = None
    sign: signing.Sign | None = None

    @property
    def name(self) -> str:
        return f"the shared cache {self.url}"


_WORKER_PATIENCE_SECS = 2.0
_CLAIM_SECS = 60
"""A claim holds for the minute it is made in and the next one."""


@functools.cache
def store_of_worker(cache: str, url: str, trusted: tuple[str, ...]) -> SharedStore:
    """Return what a worker finds objects and cubins in: it asks the shared cache for what is not here; the build shares what it makes."""
    access = access_to(SharedCache(url, "read", trusted), Path())
    return SharedStore(LocalStore(Path(cache)), access, lambda _: None, Patience(_WORKER_PATIENCE_SECS))


def access_to(cache: SharedCache, root: Path) -> Access:
    """Return how a workspace's cache is used; raise ToolchainError where a key cannot be read."""
    parts = urlsplit(cache.url)
    if parts.scheme in {"http", "https"}:
        from kerneldecl.store.http_cache import HttpCache, authorization_for  # a folder needs no client

        connect: Callable[[], Remote] = functools.partial(HttpCache, cache.url, authorization_for(cache.url, os.environ))
    elif parts.scheme in OBJECT_STORES:
        from kerneldecl.store.object_cache import ObjectCache

        # An endpoint without TLS is that of a server on this machine, or one that whoever runs the build has named.
        connect = functools.partial(ObjectCache, cache.url, allow_http=os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"))
    else:
        folder = root / unquote(parts.path if parts.scheme else cache.url)
        connect = functools.partial(FolderCache, folder)
    writes = cache.mode != "read"
    return Access(
        connect=connect,
        url=cache.url if parts.netloc else str(folder),
        writes=writes,
        is_required=cache.mode == "required",
        verify=signing.verifier(cache.trusted) if cache.trusted else None,
        sign=signing.signer_of(os.environ) if writes else None,
    )


class SharedStore:
    """A local store that reads what it lacks from a shared cache, and shares what is written to it. Implements `Store`.

    What plans read is not asked for one by one: `fetch` brings it.
    """

    def __init__(self, near: LocalStore, access: Access, say: Say, patience: Patience | None = None) -> None:
        self.near = near
        self.fetched = 0
        """Records that came from the cache."""
        self.shared = 0
        """Records that went there."""
        self._access = access
        self._say = say
        patience = patience or Patience()
        self._began_ns = time.time_ns()
        self._reading = Connections(access.connect, patience, self._cannot_read)
        self._writing = Connections(access.connect, patience, self._cannot_write)
        self._absent: set[Wanted] = set()
        self._unsound: set[Wanted] = set()
        """Entries that are nobody's: they may be replaced."""
        self._there: set[Wanted] = set()
        self._kept: dict[Wanted, Record] = {}
        """Records that came and were judged: plans need not read them from the disk."""
        self._written: list[Wanted] = []
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    # What a store must do

    def read(self, kind: str, record_key: str, *, is_local: bool) -> Record | Miss:
        if kept := self._kept.get(Wanted(kind, record_key, is_local)):
            return kept
        found = self.near.read(kind, record_key, is_local=is_local)
        if isinstance(found, Record) or kind not in _READ_ALONE or not self.fetch([Wanted(kind, record_key, is_local)]):
            return found
        return self.near.read(kind, record_key, is_local=is_local)

    def all(self, kind: str, *, is_local: bool) -> Iterator[Record]:
        return self.near.all(kind, is_local=is_local)

    def write(self, kind: str, manifest: str, result: Result, *, is_local: bool) -> str:
        record_key = self.near.write(kind, manifest, result, is_local=is_local)
        wanted = Wanted(kind, record_key, is_local)
        self._kept.pop(wanted, None)
        with self._lock:
            self._written.append(wanted)
        return record_key

    def forget(self, kind: str, record_key: str, *, is_local: bool) -> None:
        wanted = Wanted(kind, record_key, is_local)
        self._absent.add(wanted)  # what is to be found out again is not fetched
        self._kept.pop(wanted, None)
        with self._lock:
            self._written = [written for written in self._written if written != wanted]
        self.near.forget(kind, record_key, is_local=is_local)

    def blobs_there(self) -> Callable[[str], bool]:
        return self.near.blobs_there()

    def read_blob(self, blob_digest: str) -> bytes | Miss:
        return self.near.read_blob(blob_digest)

    def write_blob(self, content: bytes) -> str:
        return self.near.write_blob(content)

    # What the cache adds

    @property
    def url(self) -> str:
        """Where the cache is, from any folder."""
        return self._access.url

    @property
    def is_open(self) -> bool:
        """Whether the cache is still asked."""
        return not self._reading.why_closed

    def fetch(self, wanted: Iterable[Wanted], *, anew: bool = False) -> int:
        """Bring records with their blobs into the local store, and return how many came; raise CacheError if a required cache fails.

        `anew` asks again for what the cache did not have.
        """
        asked = [each for each in dict.fromkeys(wanted) if _is_shared(each) and (anew or each not in self._absent)]
        self._absent.update(asked)
        came = sum(map(bool, self._reading.run([functools.partial(self._get, each) for each in asked])))
        self.fetched += came
        self._check()
        return came

    def share(self, wanted: Iterable[Wanted] = ()) -> None:
        """Share what was written since the last call, and these, unless the cache has them; do not wait for it."""
        with self._lock:
            written, self._written = self._written, []
        if self._access.writes:
            for each in dict.fromkeys((*written, *wanted)):
                if _is_shared(each) and each not in self._there:
                    self._there.add(each)
                    self._writing.start(functools.partial(self._put, each))
        self._check()

    def claim(self, wanted: Wanted) -> bool:
        """Say that this build is about to make a record, unless another has said so in the last minutes; return whether it may.

        A claim ends by itself, so that one whose build was killed is in nobody's way. It is a courtesy: two that claim within the same
        millisecond on a server without conditional writes, or machines whose clocks differ by minutes, both make the record, and the first
        one stays.
        """
        if not self._access.writes or wanted in self._unsound | self._there:  # there is an entry that does not count here
            return True
        (was_claimed,) = self._writing.run([functools.partial(self._claim, wanted)])
        return not was_claimed

    def _claim(self, wanted: Wanted, remote: Remote) -> bool:
        """Return whether another build has claimed a record; claim it if none has."""
        now = int(time.time() // _CLAIM_SECS)
        names = [f"ac/{digest(f'claim of {wanted.key} in {slot}'.encode())}" for slot in (now, now - 1)]
        if any(remote.has(name) for name in names):
            return True
        pack = shared_entry.packed(secrets.token_bytes(16), ())
        if not remote.put(names[0], shared_entry.entry_text("claim", pack, "")):
            return True
        # A server without conditional writes keeps the last claim; one made at the end of the last minute may have come in between.
        return _is_of_another(remote.get(names[0], shared_entry.MOST_ENTRY_BYTES), pack) or remote.has(names[1])

    def made_by_workers(self) -> list[Wanted]:
        """Return what other processes of this build have written into the local store: compile workers do."""
        folders = ((kind, self.near.record_path(kind, "", is_local=True).parent) for kind in ("build", "cubin"))
        files = ((kind, file) for kind, folder in folders if folder.is_dir() for file in os.scandir(folder))
        return [Wanted(kind, file.name.removesuffix(".json"), True) for kind, file in files if file.stat().st_mtime_ns >= self._began_ns]

    def finish(self) -> None:
        """Wait until all is shared; raise CacheError if a required cache has failed."""
        self._writing.finish()
        self._check()

    def close(self) -> None:
        """End the connections, without waiting for what is still to be shared."""
        self._writing.close()
        self._reading.close()

    def _get(self, wanted: Wanted, remote: Remote) -> bool:
        content = remote.get(f"ac/{wanted.key}", shared_entry.MOST_ENTRY_BYTES)
        if content is None:
            return False
        try:
            pack = self._trusted_pack(wanted, content, remote)
            if pack is None:
                return False
            self._keep(wanted, *shared_entry.unpacked(pack))
        except EntryError as error:
            self._unsound.add(wanted)
            self._warn("unsound", f"{self._access.name} holds unsound entries, which are ignored ({wanted.key[:12]} {error})")
            return False
        self._there.add(wanted)
        return True

    def _trusted_pack(self, wanted: Wanted, content: bytes, remote: Remote) -> bytes | None:
        """Return the pack of an entry, None where nobody who is trusted has signed it or the cache has lost it; raise EntryError."""
        entry = shared_entry.read_entry(content)
        if self._access.verify and not self._access.verify(shared_entry.signed_text(wanted.key, entry.digest), entry.signature):
            self._there.add(wanted)  # it is somebody's, and stays
            how = "signed by nobody whom trust.keys name" if entry.signature else "not signed"
            self._warn("untrusted", f"{self._access.name} holds entries that are {how} (such as {wanted.key[:12]}); they are ignored")
            return None
        pack = remote.get(f"cas/{entry.digest}", entry.size) if entry.pack is None else entry.pack
        if pack is None:
            self._unsound.add(wanted)
        elif digest(pack) != entry.digest:
            raise EntryError("has other content than its digest says")
        return pack

    def _keep(self, wanted: Wanted, text: bytes, blobs: list[bytes]) -> None:
        """Write a record and its blobs into the local store; raise EntryError where they are not sound, or a blob is missing.

        Where there is a record, it stays, and gets those of its blobs that are among these.
        """
        near, (kind, record_key, is_local) = self.near, wanted
        record = judged(text, kind, record_key, "its record")
        if isinstance(record, Miss):
            raise EntryError(f"is refused: {record.reason}")
        known = near.read(kind, record_key, is_local=is_local)
        own = known if isinstance(known, Record) else record
        needed = set(shared_entry.blobs_of(kind, own.result))
        given = {digest(blob): blob for blob in blobs}
        if not needed <= given.keys():
            raise EntryError("lacks blobs that its record names")
        for name in needed:
            if not os.path.exists(path := near.blob_file(name)):  # noqa: PTH110
                write_whole(path, given[name], durable=False)  # it can be fetched again
        if known is not own:
            write_whole(near.record_file(kind, record_key, is_local=is_local), text, durable=False)
            self._kept[wanted] = record

    def _put(self, wanted: Wanted, remote: Remote) -> None:
        is_unsound = wanted in self._unsound
        if not is_unsound and remote.has(f"ac/{wanted.key}"):
            return
        pack = self._packed(wanted)
        if pack is None:
            return
        found = digest(pack)
        signature = self._access.sign(shared_entry.signed_text(wanted.key, found)) if self._access.sign else ""
        if not shared_entry.is_inline(pack):
            remote.put(f"cas/{found}", pack, replaces=is_unsound)
        remote.put(f"ac/{wanted.key}", shared_entry.entry_text(wanted.kind, pack, signature), replaces=is_unsound)
        with self._lock:
            self.shared += 1

    def _packed(self, wanted: Wanted) -> bytes | None:
        """Return a record of the local store with its blobs; None where either is not there any more."""
        near, (kind, record_key, is_local) = self.near, wanted
        try:
            text = read_regular(near.record_path(kind, record_key, is_local=is_local))
        except (OSError, UnsafeFileError):
            return None
        record = judged(text, kind, record_key, "")
        blobs = [near.read_blob(name) for name in shared_entry.blobs_of(kind, record.result)] if isinstance(record, Record) else [record]
        there = [blob for blob in blobs if not isinstance(blob, Miss)]
        return shared_entry.packed(text, there) if len(there) == len(blobs) else None

    def _cannot_read(self, why: str) -> None:
        self._cannot(why, "this build goes on without it")
        self._writing.give_up(why)

    def _cannot_write(self, why: str) -> None:
        self._cannot(why, "what is made here is not shared")

    def _cannot(self, why: str, so: str) -> None:
        if not self._access.is_required:
            self._warn("failed", f"{self._access.name} {why}; {so}")

    def _warn(self, about: str, text: str) -> None:
        with self._lock:
            is_new = about not in self._warned
            self._warned.add(about)
        if is_new:
            self._say(text)

    def _check(self) -> None:
        why = self._reading.why_closed or self._writing.why_closed
        if why and self._access.is_required:
            raise CacheError(f"{self._access.name} {why}; the workspace requires it (mode in [cache])")


def _is_of_another(claim: bytes | None, pack: bytes) -> bool:
    try:
        return claim is not None and shared_entry.read_entry(claim).digest != digest(pack)
    except EntryError:
        return False


def _is_shared(wanted: Wanted) -> bool:
    return wanted.kind in KINDS and is_digest(wanted.key)
