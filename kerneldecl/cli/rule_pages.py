"""Owns writing the pages of rules as Markdown: who serves each rule's example, asked of policies, and figures from workloads.lock.

Knows nothing of how a page looks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import tomli

from kerneldecl.declare.catalogue import RulePage, example_attrs, rule_pages
from kerneldecl.declare.document import declare
from kerneldecl.declare.rule_markdown import Figure, Serving, pages_of
from kerneldecl.model import IterSpace
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import policies_behind
from kerneldecl.runners.local import LocalRunner
from kerneldecl.serial import space_from_json
from kerneldecl.store.files import write_whole

ARCHS = ("x86-64-v3", "a100-80gb", "h200")
"""Of which the pages say who serves a rule: CPUs with AVX2, GPUs with mma.sync, and GPUs with wgmma."""
MEASURED = "h200"
LIMIT_SECS = 300.0
PROPOSALS = 4


def write_rule_pages(root: Path, folder: Path) -> list[Path]:
    """Write a page of each rule of a workspace, and an index, to a folder; return the files."""
    pages = rule_pages(root)
    texts = pages_of(pages, served(root, pages), figures(root))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text, durable=False)
    return [folder / name for name in texts]


def served(root: Path, pages: Sequence[RulePage]) -> dict[str, list[Serving]]:
    """Return for each rule whose example's values are known who proposes kernels of it on each arch."""
    known = [page.name for page in pages if page.signature]
    jobs = len(os.sched_getaffinity(0))
    with LocalRunner(jobs, jobs) as runner:
        requests = [{"action": "lower", "root": str(root), "rule": name, "attrs": example_attrs(root, name)} for name in known]
        spaces = {known[at]: space_from_json(answer["space"]) for at, answer in runner.run_all(requests, LIMIT_SECS) if "space" in answer}
    return {name: [_serving(root, spaces[name], arch) for arch in ARCHS] for name in known if name in spaces}


def _serving(root: Path, space: IterSpace, arch: str) -> Serving:
    """Return the first policy of `auto` that proposes something, and the templates of that."""
    loaded = load_arch(root, arch)
    for name in policies_behind(root, "auto", loaded.kind):
        if proposals := load_module("policies", root, name).propose(space, loaded, PROPOSALS):
            return Serving(arch, name, tuple(dict.fromkeys(each.candidate.template for each in proposals)))
    return Serving(arch, "", ())


def figures(root: Path) -> dict[str, list[Figure]]:
    """Return the figures of entries that were tuned for the measured arch, by rule; none where there is no workspace or no lock."""
    lock = root / "workloads.lock"
    if not lock.is_file():
        return {}
    declared = {workload.entry: workload for workload in declare(root).workloads}
    found: dict[str, list[Figure]] = {}
    for entry in tomli.loads(lock.read_text(encoding="utf-8")).get("entry", []):
        workload = declared.get(entry["name"])
        if workload is None or not entry["name"].endswith(f"@{MEASURED}") or "time_us" not in entry:
            continue
        rule = load_rule(root, workload.rule).of(root, dict(workload.attrs))
        rate = _rate(rule.flops(), rule.least_bytes(), entry["time_us"])
        template = entry["winner"].partition("(")[0]
        found.setdefault(workload.rule, []).append(Figure(entry["name"].rpartition("@")[0], template, entry["time_us"], rate))
    return found


def _rate(flops: int, nbytes: int, time_us: float) -> str:
    """Return operations a second where there are many for each byte, else bytes a second."""
    per_s = 1e6 / time_us
    return f"{flops * per_s / 1e12:.3g} TFLOP/s" if flops > 64 * nbytes else f"{nbytes * per_s / 1e12:.3g} TB/s"
