"""Owns the actions that need TVM, as plain functions of JSON values: lower, build, describe, extract.

Knows nothing of processes, policies, keys of records or the order of actions.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.artifact.link import LINKERS
from kerneldecl.compiler import canonical, cpu, cuda
from kerneldecl.compiler.dynamic_shapes import dynamic_dims, only_for_other_sizes
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.prim_funcs import specialised_function
from kerneldecl.errors import DeclarationError
from kerneldecl.model import SPECIALIZE, Arch, Candidate
from kerneldecl.plugins.load import blamed, custom_kernels, load_rule
from kerneldecl.rule import Rule
from kerneldecl.serial import arch_from_json, to_json
from kerneldecl.store.keys import build_manifest, digest, key
from kerneldecl.store.local import LocalStore, Record

Json = Mapping[str, Any]
Case = Mapping[str, Any]
"""A workload with its known computation: root, rule, attrs, computation."""


def lower(root: str, rule: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Lower a rule and return what the later stages need to know of the computation."""
    declared = _rule(root, rule, attrs)
    mod = canonical.lower(declared)
    return {
        "computation": canonical.module_digest(mod),
        "signature": to_json(declared.signature()),
        "flops": declared.flops(),
        "least_bytes": declared.least_bytes(),
        "tolerance": declared.tolerance(),
        "space": to_json(iter_space(mod)),
    }


def build(case: Case, candidate: Json, arch: Json, toolchain: Mapping[str, str], folder: str, *, afresh: bool = False) -> dict[str, Any]:
    """Apply a candidate, compile it and link it alone into `folder`; return digests, or a failure if it does not apply.

    Where the store knows what the scheduled module compiles to, nothing is compiled unless `afresh`, and `folder` gets
    no files.
    """
    mod, parsed = _lowered(case), arch_from_json(arch)
    applied = _applied(case, mod, Candidate.from_json(candidate), parsed)
    if applied is None:
        return {"failure": "the template does not apply"}
    scheduled, symbol = applied.digest, canonical.symbol(case["computation"])
    manifest = build_manifest(scheduled, symbol, parsed, toolchain)
    store = LocalStore(Path(case["root"]) / "cache")
    known = store.read("build", key(manifest), is_local=True)  # anyone can make it again: not worth committing
    if isinstance(known, Record) and not afresh:
        return {"scheduled": scheduled, **known.result}
    content, built = _compiled(applied.mod, parsed, symbol, store)
    if applied.schedule is None:
        built["is_specialised"] = True
    path = Path(folder) / f"{built['code']}.o"
    path.write_bytes(content)
    LINKERS[parsed.kind](path.with_suffix(".so"), [path])
    store.write("build", manifest, built, is_local=True)
    return {"scheduled": scheduled, **built}


def _compiled(mod: tvm.IRModule, arch: Arch, symbol: str, store: LocalStore) -> tuple[bytes, dict[str, Any]]:
    """Return the object file, and what a build record tells of it: fields of a `Trial`."""
    if arch.kind == "cpu":
        content = cpu.compile_object(mod, arch, symbol)
        return content, {"code": digest(content), "code_bytes": len(content)}
    made = cuda.compile_cuda_object(mod, arch, symbol, store)
    used = {
        "registers": max(launch.usage.registers for launch in made.launches),
        "smem_bytes": max(launch.usage.smem_bytes + launch.dynamic_smem_bytes for launch in made.launches),
        "spill_bytes": max(launch.usage.stack_bytes + launch.usage.spill_bytes for launch in made.launches),
    }
    return made.content, {"code": made.code, "code_bytes": len(made.content), **used}


def specialize(case: Case, arch: Json) -> dict[str, Any]:
    """Return how many functions the case's file gives, or what is wrong with it."""
    try:
        return {"variants": len(_specialised(json.dumps(case, sort_keys=True), json.dumps(arch, sort_keys=True)))}
    except DeclarationError as error:
        return {"failure": str(error)}


@functools.lru_cache(maxsize=1)
def _specialised(case_text: str, arch_text: str) -> tuple[cpu.Applied, ...]:
    """Return the functions that the file of the case at hand gives for it; raise DeclarationError where the file is to blame."""
    case, arch = json.loads(case_text), arch_from_json(json.loads(arch_text))
    root, path, mod = Path(case["root"]), case[SPECIALIZE], _lowered(case)
    several = custom_kernels(root, path, mod, arch)
    with blamed(root / path, root, "what specialize() returns cannot be used"):
        # The schedule of a module that the file has made itself is kept as what it leads to: its trace would apply to no other.
        ours = (isinstance(each, tvm.s_tir.Schedule) and not cpu.replays(each, mod) for each in several)
        return tuple(cpu.applied(mod, each.mod if is_other else each) for each, is_other in zip(several, ours, strict=True))


def _applied(case: Case, mod: tvm.IRModule, candidate: Candidate, arch: Arch) -> cpu.Applied | None:
    if candidate.template != SPECIALIZE:
        return cpu.apply_candidate(Path(case["root"]), mod, candidate, arch)
    made = _specialised(json.dumps(case, sort_keys=True), json.dumps(to_json(arch), sort_keys=True))
    return made[int(dict(candidate.params)["variant"])]  # type: ignore[arg-type]  # it is a number


def describe(case: Case, candidate: Json, arch: Json) -> dict[str, Any]:
    """Return what an artifact holds of a candidate beside its object file: database lines or a specialised function, and the source."""
    mod, parsed = _lowered(case), arch_from_json(arch)
    applied = _applied(case, mod, Candidate.from_json(candidate), parsed)
    assert applied is not None, "a winner applies"
    if applied.schedule:
        held = dataclasses.asdict(cpu.database_lines(applied.schedule, mod, parsed))
    else:
        held = dataclasses.asdict(specialised_function(mod, applied.mod))
    return {"database": json.dumps(held, sort_keys=True), "source": applied.mod["main"].script()}


def extract(root: str, model: str, sizes: Mapping[str, Sequence[int]] | None = None) -> dict[str, Any]:
    """Return what a model calls: functions that an entry can stand for, and why others have none; a problem if it is no model.

    `sizes` are those that a dynamic dimension is to have entries for.

    A function has name, calls, rule, attrs (those that are to be declared) and identity (those that tell its entry from
    others); one of rule tensor_ir has its IR instead of attributes.
    """
    from kerneldecl.compiler.model_import import read_model

    try:
        mod = read_model.read_model(model)
        if sizes:
            mod = read_model.of_sizes(mod, sizes)
    except read_model.ModelError as error:
        return {"problem": error.sentence, "hint": error.hint}
    dims = [] if sizes else dynamic_dims(mod)
    mod = read_model.fused(mod)
    functions: dict[str, dict[str, Any]] = {}
    left_out = [{"name": name, "reason": "TVM lowers this operator to no TensorIR"} for name in read_model.unlowered(mod)]
    others = only_for_other_sizes(mod)
    for name, func, calls in read_model.called(mod):
        if reason := read_model.function_problem(func):
            if name in others:
                reason = f"{reason}; it is for sizes that are not declared, by TVM's default schedule"
            elif dims and read_model.is_dynamic(func):
                reason = f"{reason}; --dim {dims[0]}=1,16 has entries for these sizes"
            left_out.append({"name": name, "reason": reason})
            continue
        module = canonical.canonical_module(func)
        found = functions.setdefault(match_digest(module["main"]), {"name": name, "calls": 0, "mod": module})
        found["calls"] += calls
    described = [{**_described(Path(root), found.pop("mod")), **found} for found in functions.values()]
    return {"functions": described, "left_out": left_out}


def _described(root: Path, mod: tvm.IRModule) -> dict[str, Any]:
    from kerneldecl.compiler.model_import.match_rules import recognised

    known = recognised(mod, root)
    if known is None:
        return {"rule": "tensor_ir", "computation": canonical.module_digest(mod), "ir": tvm.ir.save_json(mod["main"])}
    proposal, identity = known
    return {"rule": proposal.rule, "attrs": proposal.attrs, "identity": identity}


def _rule(root: str, rule: str, attrs: Json) -> Rule:
    return load_rule(Path(root), rule).of(Path(root), attrs)


def _lowered(case: Case) -> tvm.IRModule:
    """Return the case's module; raise ValueError if it is not the computation that was planned with."""
    text = json.dumps(case, sort_keys=True)
    if text not in _LOWERED:
        mod = canonical.lower(_rule(case["root"], case["rule"], case["attrs"]))
        if canonical.module_digest(mod) != case["computation"]:
            raise ValueError(f"rule {case['rule']} computes something else than when this build began; build again")
        _LOWERED.clear()
        _LOWERED[text] = mod
    return _LOWERED[text]


_LOWERED: dict[str, tvm.IRModule] = {}
"""Holds the case at hand: the candidates of a workload come one after the other."""
