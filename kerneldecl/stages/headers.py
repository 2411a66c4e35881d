"""Owns kernels as headers: what a worker is asked to export, and the stage that has it done for artifacts that carry them.

Knows nothing of what headers hold. They follow from an entry's record, and are kept in the store like all that can be made again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kerneldecl.diagnostics.units import duration
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.roofline import roofline_of
from kerneldecl.planning.workspace import Workspace
from kerneldecl.serial import to_json
from kerneldecl.stages.session import Session
from kerneldecl.store import keys
from kerneldecl.store.local import Record
from kerneldecl.toolchain.versions import installed
from kerneldecl.tuning.events import Note
from kerneldecl.tuning.task import BUILD_SECS, spec_of

FORMS = {"cuda": "cuda", "cpu": "c"}
"""The format of a header, by kind of arch."""
ENDINGS = {"cuda": ".cuh", "cpu": ".h"}
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_WORDS = re.compile(
    r"alignas|alignof|and|asm|auto|bool|break|case|catch|char|class|const|constexpr|continue|decltype|default|delete|do|double"
    r"|else|enum|explicit|export|extern|false|float|for|friend|goto|if|inline|int|long|mutable|namespace|new|noexcept|not"
    r"|nullptr|operator|or|private|protected|public|register|requires|return|short|signed|sizeof|static|struct|switch|template"
    r"|this|throw|true|try|typedef|typename|union|unsigned|using|virtual|void|volatile|while|xor"
)
"""Words of C and C++ that are no function's name."""


def write_headers(session: Session) -> None:
    """Have headers written for the links that lack them. A kernel that cannot be exported has none, which is said."""
    wanted = {_key(entry): entry for entry in _lacking(session)}
    entries = list(wanted.values())
    requests = [export_request(session.workspace, entry, FORMS[entry.arch.kind], function_name(entry.workload.name)) for entry in entries]
    for index, answer in session.runner.run_all(requests, BUILD_SECS):
        if "failure" in answer:
            session.report(Note(f"{entries[index].entry} has no header: {answer['failure']}"))
            continue
        blob = session.workspace.own_store.write_blob(answer["text"].encode())
        session.workspace.store.write("header", _manifest(entries[index]), {"blob": blob}, is_local=True)


def lacks_headers(session: Session) -> bool:
    """Say whether a header is declared that is not in the store."""
    return next(_lacking(session), None) is not None


def header_of(session: Session, entry: EntryPlan) -> tuple[str, str]:
    """Return the file name and the digest of an entry's header; two empty texts where none is declared or it has none."""
    if not session.workspace.declaration.has_headers:
        return "", ""
    found = _found(session, entry)
    return (f"{function_name(entry.workload.name)}{ENDINGS[entry.arch.kind]}", found) if found else ("", "")


def _lacking(session: Session) -> Iterator[EntryPlan]:
    """Yield tuned entries of targets that are to be linked whose headers are declared and not there."""
    linked = {link.target for link in session.plan.links if not link.is_hit}
    if session.workspace.declaration.has_headers:
        for entry in session.entries:
            if entry.workload.target in linked and entry.tuned and entry.lowered and not _found(session, entry):
                yield entry


def _found(session: Session, entry: EntryPlan) -> str:
    """Return the digest of an entry's header; empty where it is not in the store."""
    record = session.workspace.store.read("header", _key(entry), is_local=True)
    blob = str(record.result["blob"]) if isinstance(record, Record) else ""
    return blob if blob and isinstance(session.workspace.store.read_blob(blob), bytes) else ""


def _manifest(entry: EntryPlan) -> str:
    fields = {"entry": entry.link_digest, "name": entry.workload.name, "codegen": keys.CODEGEN, "kerneldecl": installed("kerneldecl")}
    return keys.manifest("header", fields)


def _key(entry: EntryPlan) -> str:
    return keys.key(_manifest(entry))


def export_request(workspace: Workspace, entry: EntryPlan, form: str, name: str) -> dict[str, Any]:
    """Return what a worker is asked for an entry's winner as source or machine code, with a function of this name."""
    assert entry.lowered is not None, "what is exported is tuned"
    assert entry.tuned is not None, "what is exported is tuned"
    asked = {"format": form, "name": name, "about": about(entry), "figures": figures(entry), "signature": entry.lowered.signature}
    request = {"device": "export", "action": "export", "candidate": entry.tuned.winner.to_json(), "arch": to_json(entry.arch)}
    return {**request, "spec": spec_of(workspace.root, workspace.cache, entry.workload, entry.lowered, {}), "asked": asked}


def is_function_name(name: str) -> bool:
    """Say whether C and C++ allow a function of this name."""
    return NAME.fullmatch(name) is not None and not _WORDS.fullmatch(name)


def function_name(name: str) -> str:
    """Return an entry's name in letters that C++ allows: `projection[m=128]` is projection_m_128."""
    legal = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return legal if is_function_name(legal) else f"kernel_{legal}"


def about(entry: EntryPlan) -> list[str]:
    """Return lines that say where a kernel is from."""
    assert entry.tuned is not None, "what is exported is tuned"
    attrs = ", ".join(f"{name}={value}" for name, value in entry.workload.attrs)
    time = f"{duration(entry.tuned.run_secs)} {'measured' if entry.tuned.is_measured else 'expected'}"
    return [
        f"{entry.entry}: rule {entry.workload.rule}, {attrs}",
        f"{entry.tuned.winner}, {time}; record {entry.tuned.key[:16]}",
        f"Exported by kerneldecl {installed('kerneldecl')}; do not edit.",
    ]


def figures(entry: EntryPlan) -> dict[str, float]:
    """Return the work of a call, the least time that the device's peak and bandwidth allow, and the record's time."""
    assert entry.lowered is not None, "what is exported is tuned"
    assert entry.tuned is not None, "what is exported is tuned"
    roofline = roofline_of(entry)
    return {
        "flops": roofline.flops,
        "least_bytes": roofline.least_bytes,
        "least_secs": float(f"{roofline.least_secs:.4g}"),
        "recorded_secs": entry.tuned.run_secs,
    }
