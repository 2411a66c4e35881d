"""Owns the verification of an artifact: its files by digest, its kernels against their references.

Knows nothing of plans or records: an artifact's manifest describes it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kerneldecl.artifact.manifest import artifact_defect, artifact_folder, read_manifest
from kerneldecl.errors import ExitCode
from kerneldecl.planning.workspace import Workspace
from kerneldecl.runners.local import LocalRunner
from kerneldecl.runners.verdict import judged

LIMIT_SECS = 120.0
SEED = 21
"""Seed of the inputs; candidates were verified with other inputs."""


def artifacts_of(workspace: Workspace) -> list[Path]:
    """Return the folders of the workspace's artifacts, built or not."""
    declaration = workspace.declaration
    targets = dict.fromkeys(workload.target for workload in declaration.workloads)
    return [artifact_folder(workspace.root, declaration.artifact, declaration.version, target) for target in targets]


def verify_artifact(folder: Path, root: Path) -> dict[str, Any]:
    """Return the verdict on each entry. Rules for the references are those of the workspace `root` and the standard ones.

    No kernel is loaded where a file does not match the manifest.
    """
    if defect := artifact_defect(folder):
        return {"artifact": str(folder), "exit_code": int(ExitCode.INTEGRITY), "defect": defect, "entries": [], "missing": {}}
    manifest = read_manifest(folder)
    assert not isinstance(manifest, str), "artifact_defect has read it"
    library = str((folder / manifest["library"]).resolve())
    cores = manifest["arch"].get("cpu", {"cores": len(os.sched_getaffinity(0))})["cores"]
    with LocalRunner(1, cores) as runner:
        device = {"device": manifest["arch"]["kind"], "model": manifest["arch"]["model"]}
        entries = [_verdict(entry, {**device, "library": library}, root, runner) for entry in manifest["entries"]]
    code = ExitCode.DONE if all(entry["ok"] for entry in entries) else ExitCode.VERIFICATION
    return {"artifact": str(folder), "exit_code": int(code), "defect": "", "entries": entries, "missing": manifest["missing"]}


def _verdict(entry: dict[str, Any], where: dict[str, str], root: Path, runner: LocalRunner) -> dict[str, Any]:
    case = {"root": str(root), "rule": entry["rule"], "attrs": entry["attrs"], "seed": SEED}
    case |= {"nan": entry["nan"]} if "nan" in entry else {}
    request = {"action": "verify", **where, "spec": case, "symbol": entry["symbol"]}
    answer = runner.measure(request, LIMIT_SECS)
    tolerance = entry["verdict"]["tolerance"]
    failure = judged(answer, tolerance)
    return {"name": entry["name"], "ok": not failure, "error": answer.get("error"), "tolerance": tolerance, "failure": failure}


def verify_text(found: dict[str, Any]) -> str:
    """Return a line for each entry, and one for each artifact."""
    lines: list[str] = []
    for artifact in found["artifacts"]:
        if artifact["defect"]:
            lines.append(f"{artifact['artifact']}: {artifact['defect']}; run `kerneldecl build` to rebuild it")
            continue
        lines += [_line(entry) for entry in artifact["entries"]]
        lines += [f"missing  {name}  {reason}" for name, reason in artifact["missing"].items()]
        right = sum(entry["ok"] for entry in artifact["entries"])
        lines.append(f"{artifact['artifact']}: files match the manifest; {right} of {len(artifact['entries'])} kernels correct")
    return "\n".join(lines)


def _line(entry: dict[str, Any]) -> str:
    if entry["ok"]:
        return f"ok     {entry['name']}  relative error {entry['error']:.2g} (allowed {entry['tolerance']:g})"
    return f"WRONG  {entry['name']}  {entry['failure']}"
