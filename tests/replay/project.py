"""Owns all that the replay asks of the project: here alone are its modules imported.

Knows nothing of which workloads there are or of what is frozen. TVM is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

from support.repository import REPOSITORY

from kerneldecl.model import Arch, Candidate, Cpu, IterSpace, Value
from kerneldecl.plugins.find import STANDARD, plugin_names
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import is_tuner, policies_behind, standard_order
from kerneldecl.serial import space_from_json, to_json
from kerneldecl.store.keys import digest

__all__ = ["KINDS", "Candidate", "IterSpace", "Value", "digest", "policies_behind", "space_from_json", "to_json"]

ROOT = REPOSITORY
"""Where the rules and the files of `tensor_ir` are."""
KINDS = ("cpu", "cuda")
TOP_K, INNER_TOP_K = 20, 80
"""Of policies of `auto`, and of those that only others ask: clusters and splits of convolutions are far down their lists."""
_LLVM = (("kind", "llvm"), ("mcpu", "x86-64-v3"), ("num-cores", 16))
_SERVER = Cpu(
    cores=16,
    vector_bytes=64,
    vector_registers=32,
    fma_per_cycle=2.0,
    l1d_bytes=48 << 10,
    l2_bytes=2 << 20,
    l3_bytes=32 << 20,
    line_bytes=64,
    clock_hz=2.9e9,
    l1_bytes_per_cycle=128.0,
    l2_bytes_per_cycle=48.0,
    l3_bytes_per_cycle=12.0,
    dram_bytes_per_s=1.5e11,
    parallel_secs=5e-6,
)
_DESKTOP = replace(
    _SERVER,
    cores=4,
    vector_bytes=32,
    vector_registers=16,
    l1d_bytes=32 << 10,
    l2_bytes=256 << 10,
    l3_bytes=6 << 20,
    clock_hz=3.6e9,
    l1_bytes_per_cycle=64.0,
    l2_bytes_per_cycle=32.0,
    dram_bytes_per_s=3e10,
)
CPUS = {name: Arch(name, "cpu", "", _LLVM, cpu) for name, cpu in (("server", _SERVER), ("desktop", _DESKTOP))}
"""In the place of `host`, which differs from machine to machine."""


NOT_ASKED = frozenset({"default"})
"""Policies that propose the same for everything."""


def arch_named(name: str) -> Arch:
    return CPUS.get(name) or load_arch(ROOT, name)


def policy_names() -> tuple[str, ...]:
    return plugin_names("policies", STANDARD)


def tuner_names() -> tuple[str, ...]:
    return tuple(name for name in policy_names() if is_tuner(STANDARD, name))


def template_names() -> tuple[str, ...]:
    return plugin_names("templates", STANDARD)


def asked_policies(kind: str) -> list[str]:
    """Return the policies of `auto` for a kind of arch, in their order, and then those that only other policies ask."""
    others = {*NOT_ASKED, *(name for each in KINDS for name in standard_order(each))}
    inner = [name for name in policy_names() if name not in others and hasattr(load_module("policies", STANDARD, name), "propose")]
    return [*standard_order(kind), *(inner if kind == "cuda" else ())]


def policy(name: str) -> ModuleType:
    return load_module("policies", STANDARD, name)


def proposed(name: str, space: IterSpace, arch: Arch) -> list[tuple[str, dict[str, Value], float]]:
    """Return what a policy proposes: templates with their parameters and predicted seconds, best first."""
    top_k = TOP_K if name in standard_order(arch.kind) else INNER_TOP_K
    found = policy(name).propose(space, arch, top_k)
    return [(one.candidate.template, dict(one.candidate.params), one.predicted_secs) for one in found]


def lowered(rule: str, attrs: Mapping[str, Any]) -> Any:
    """Return the module of a workload of a standard rule; raise ValueError where its attributes make no sense together."""
    from kerneldecl.compiler import canonical

    declared = load_rule(ROOT, rule).of(ROOT, attrs)
    if problems := list(declared.problems()):
        raise ValueError(f"{rule} {attrs}: {'; '.join(problems)}")
    return canonical.lower(declared)


def space_of(mod: Any) -> IterSpace:
    from kerneldecl.compiler.iter_space import iter_space

    return iter_space(mod)


class Schedule(NamedTuple):
    """What a template makes of a module."""

    digest: str
    """What stands for it in keys. It depends on the names of variables unless there is a trace."""
    has_trace: bool
    text: str


def schedule(mod: Any, template: str, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return what a template makes of a module, None where it does not apply."""
    from kerneldecl.compiler.cpu import apply_candidate

    applied = apply_candidate(STANDARD, mod, Candidate.of(template, params), arch)
    if applied is None:
        return None
    has_trace = applied.schedule is not None
    return Schedule(applied.digest, has_trace, "" if has_trace else applied.mod["main"].script(show_meta=True))
