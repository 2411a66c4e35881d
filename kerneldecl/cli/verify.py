"""Owns the verification of an artifact: its files by digest, its kernels against their references.

Knows nothing of plans or records: an artifact's manifest describes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kerneldecl.artifact.manifest import DATABASE, WITH_INTRINSICS, WORKLOADS, artifact_defect, artifact_folder, machine_of, read_manifest
from kerneldecl.errors import ExitCode, ToolchainError
from kerneldecl.planning.workspace import Workspace
from kerneldecl.plugins.find import STANDARD
from kerneldecl.runners.local import LocalRunner, in_order
from kerneldecl.runners.process import Answer
from kerneldecl.runners.verdict import judged
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.toolchain.machines import here

Json = Mapping[str, Any]
LIMIT_SECS = 120.0
SEED = 21
"""Seed of the inputs; candidates were verified with other inputs."""


def artifacts_of(workspace: Workspace) -> list[Path]:
    """Return the folders of the workspace's artifacts, built or not."""
    declaration = workspace.declaration
    targets = dict.fromkeys(workload.target for workload in declaration.workloads)
    return [artifact_folder(workspace.root, declaration.artifact, declaration.version, target) for target in targets]


def verify_artifact(folder: Path, root: Path) -> dict[str, Any]:
    """Return the verdict on each entry.

    A reference is that of the rule of the workspace `root`, or of the standard one; where there is none, the computation itself, which the
    artifact holds. No code is loaded where a file does not match the manifest. Raise ToolchainError where it is for another machine.
    """
    folder, root = folder.resolve(), root.resolve()  # workers have folders of their own
    if defect := artifact_defect(folder):
        return {"artifact": str(folder), "exit_code": int(ExitCode.INTEGRITY), "defect": defect, "entries": [], "missing": {}}
    manifest = read_manifest(folder)
    assert not isinstance(manifest, str), "artifact_defect has read it"
    if (machine := machine_of(manifest)) != here():
        raise ToolchainError(f"{folder} is for {machine}; this machine is {here()}")
    library = str((folder / manifest["library"]).resolve())
    cores = manifest["arch"].get("cpu", {"cores": len(os.sched_getaffinity(0))})["cores"]
    with LocalRunner(1, cores) as runner, scratch_folder() as scratch:
        device = {"device": manifest["arch"]["kind"], "model": manifest["arch"]["model"], "library": library}
        references = references_of(folder, manifest, root, scratch, runner)
        verdicts = [_verdict(entry, device, given, runner) for entry, given in zip(manifest["entries"], references, strict=True)]
    found = {"artifact": str(folder), "defect": "", "entries": verdicts, "missing": manifest["missing"]}
    return {**found, "exit_code": int(_exit_code(verdicts))}


def _exit_code(verdicts: Sequence[Mapping[str, Any]]) -> ExitCode:
    if any(verdict["checked"] and not verdict["ok"] for verdict in verdicts):
        return ExitCode.VERIFICATION
    return ExitCode.DONE if all(verdict["checked"] for verdict in verdicts) else ExitCode.FAILED


def references_of(folder: Path, manifest: Json, root: Path, scratch: Path, runner: LocalRunner) -> list[Answer]:
    """Return where each entry's inputs and reference come from, or why it has none."""
    entries = manifest["entries"]
    files = list(dict.fromkeys(str(folder / entry["traceless"]) for entry in entries if entry["traceless"]))
    workloads = [f"{name}/{WORKLOADS}" for name in (DATABASE, WITH_INTRINSICS)]
    databases = [str(folder / name) for name in workloads if name in manifest["files"]]
    held = {"action": "computations", "databases": databases, "traceless": files, "folder": str(scratch)}
    in_order(runner.run_all([held], LIMIT_SECS), 1)  # what it cannot read is not there, which `reference_of` says
    roots = list(dict.fromkeys((str(root), str(STANDARD))))
    requests = [
        {
            "action": "reference_of",
            "roots": roots,
            "asked": {name: entry[name] for name in ("rule", "attrs", "nan", "rows") if name in entry},
            "computation": entry["computation"],
            "file": str(scratch / f"{entry['computation']}.json"),
            "is_exact": False,
        }
        for entry in entries
    ]
    return in_order(runner.run_all(requests, LIMIT_SECS), len(requests))


def _verdict(entry: Json, device: Mapping[str, str], reference: Answer, runner: LocalRunner) -> dict[str, Any]:
    tolerance, found = entry["verdict"]["tolerance"], {"name": entry["name"], "tolerance": entry["verdict"]["tolerance"]}
    if "failure" in reference:
        failure = f"its rule is not here, nor its computation: {reference['failure']}"
        return {**found, "checked": False, "ok": False, "against": "", "error": None, "failure": failure}
    found["against"] = "its rule" if reference["rule"] == entry["rule"] else "its computation, for its rule is not here"
    spec = {**reference, "seed": SEED}
    answer = runner.measure({"action": "verify", **device, "spec": spec, "symbol": entry["symbol"]}, LIMIT_SECS)
    failure = judged(answer, tolerance)
    return {**found, "checked": True, "ok": not failure, "error": answer.get("error"), "failure": failure}


def verify_text(found: dict[str, Any]) -> str:
    """Return a line for each entry, and one for each artifact."""
    lines: list[str] = []
    for artifact in found["artifacts"]:
        if artifact["defect"]:
            lines.append(f"{artifact['artifact']}: {artifact['defect']}; `kerneldecl build` makes it")
            continue
        lines += [_line(entry) for entry in artifact["entries"]]
        lines += [f"missing  {name}  {reason}" for name, reason in artifact["missing"].items()]
        right = sum(entry["ok"] for entry in artifact["entries"])
        unchecked = sum(not entry["checked"] for entry in artifact["entries"])
        more = f", {unchecked} not checked" if unchecked else ""
        more += f"; {artifact['signature']}" if "signature" in artifact else ""
        lines.append(f"{artifact['artifact']}: files match the manifest; {right} of {len(artifact['entries'])} kernels correct{more}")
    return "\n".join(lines)


def _line(entry: dict[str, Any]) -> str:
    if not entry["checked"]:
        return f"not checked  {entry['name']}  {entry['failure']}"
    if entry["ok"]:
        more = f", against {entry['against']}" if entry["against"] != "its rule" else ""
        return f"ok     {entry['name']}  relative error {entry['error']:.2g} (allowed {entry['tolerance']:g}{more})"
    return f"WRONG  {entry['name']}  {entry['failure']}"
