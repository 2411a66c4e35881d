"""Owns the actions that need TVM, as plain functions of JSON values: lower, build, describe, extract.

Knows nothing of processes, policies, keys of records or the order of actions.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.compiler import canonical, cpu, cuda
from kerneldecl.compiler.dynamic_shapes import dynamic_dims, only_outside_buckets, only_sizes
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.passes.nan import ATTRIBUTE, IGNORE
from kerneldecl.compiler.prim_funcs import traceless_function, traceless_text
from kerneldecl.compiler.rows import ONE_ROW, TRACE, for_any_rows, rows_of, unit_of, unlimited_archs, varying_extents, with_upto
from kerneldecl.compiler.rule_numbers import rule_numbers
from kerneldecl.errors import DeclarationError
from kerneldecl.model import SPECIALIZE, Arch, Candidate, dtype_bytes
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import blamed, custom_kernels, load_rule
from kerneldecl.policies.shared.traffic import points
from kerneldecl.rows import Rows
from kerneldecl.rule import Rule
from kerneldecl.serial import arch_from_json, signature_to_json, to_json
from kerneldecl.store.keys import build_manifest, digest, key
from kerneldecl.store.keys import symbol as symbol_of
from kerneldecl.store.local import LocalStore, Record
from kerneldecl.store.protocol import BlobStore
from kerneldecl.toolchain.companions import counted_with
from kerneldecl.toolchain.linkers import CANDIDATE_LINKERS

OTHER_SIZES = "other sizes"
"""What is left out of a model of which sizes are declared."""
Json = Mapping[str, Any]
Spec = Mapping[str, Any]
"""A workload spec, with the digest of its computation: root, cache, rule, attrs, computation."""


def lower(root: str, rule: str, attrs: Mapping[str, Any], nan: str = "", rows: Json | None = None) -> dict[str, Any]:
    """Lower a rule and return the facts of the computation that later stages need; raise ValueError where its tolerance admits anything."""
    declared = _rule(root, rule, attrs)
    spec = {"root": root, "rule": rule, "attrs": attrs, **({"nan": nan} if nan else {}), **({"rows": rows} if rows else {})}
    mod = _module(spec)
    varying = {"varying": _varying(spec), "any_rows": canonical.module_digest(_any_rows(spec))} if rows else {}
    return {
        "computation": canonical.module_digest(mod),
        "names": _names_digest(mod),
        "signature": signature_to_json(declared.signature()),
        **rule_numbers(declared),
        "space": to_json(iter_space(mod)),
        **varying,
    }


def _any_rows(spec: Spec) -> tvm.IRModule:
    """Return the computation of any number of rows; raise ValueError where it is not one for all of them."""
    general = for_any_rows(functools.partial(_at_rows, spec), rows_of(spec), ONE_ROW)
    if general is None:
        raise ValueError(f"what rule {spec['rule']} computes depends on {Rows.from_json(spec['rows']).attribute} by more than extents")
    return general


def _varying(spec: Spec) -> list[list[int]]:
    rows, now = Rows.from_json(spec["rows"]), rows_of(spec)
    signatures = [_rule(spec["root"], spec["rule"], rows.at(spec["attrs"], count)).signature() for count in (now, now + 2)]
    return varying_extents(signatures[0], signatures[1], rows, now)


def _at_rows(spec: Spec, count: int) -> tvm.IRModule:
    attrs = Rows.from_json(spec["rows"]).at(spec["attrs"], count)
    return _with_nan(canonical.lower(_rule(spec["root"], spec["rule"], attrs)), spec.get("nan", ""))


def _module(spec: Spec) -> tvm.IRModule:
    """Return a workload's module: with the most rows that its kernels may be called with, where that is another number."""
    mod = _with_nan(canonical.lower(_rule(spec["root"], spec["rule"], spec["attrs"])), spec.get("nan", ""))
    return with_upto(mod, spec["rows"]["upto"]) if "rows" in spec else mod


def _names_digest(mod: tvm.IRModule) -> str:
    """Return a digest of the module as it stands: objects, sources and schedules may depend on names, though computations do not."""
    return digest("\n".join(canonical.code_lines(mod)).encode())


def build(spec: Spec, candidate: Json, arch: Json, toolchain: Mapping[str, str], folder: str, *, force: bool = False) -> dict[str, Any]:
    """Apply a candidate, compile it and link it alone into `folder`; return digests, or a failure if it does not apply.

    Where the store knows what the scheduled module compiles to, nothing is compiled unless `force`, and `folder` gets
    no files.
    """
    mod, parsed = lowered(spec), arch_from_json(arch)
    result = _scheduled(spec, mod, Candidate.from_json(candidate), parsed)
    if result is None:
        return {"failure": "the template gives no kernel of any number of rows" if "rows" in spec else "the template does not apply"}
    symbol = symbol_of(spec["computation"])
    text = b"" if result.schedule else traceless_text(result.mod)
    scheduled = counted_with(digest(text), text) if text else result.digest
    manifest = build_manifest(scheduled, symbol, parsed, toolchain, spec.get("names", ""))
    store = _store(spec)
    known = store.read("build", key(manifest), is_local=True)  # reproducible, so not worth committing
    if isinstance(known, Record) and not force:
        return {"schedule_digest": scheduled, **known.result}
    content, built = _compiled(result.mod, parsed, symbol, store)
    if result.schedule is None:
        built["is_traceless"] = True
    _link(content, Path(folder) / built["code_digest"], parsed.kind)
    store.write("build", manifest, built, is_local=True)
    return {"schedule_digest": scheduled, **built}


def _store(spec: Spec) -> BlobStore:
    """Return the workspace's store, with the shared cache behind it where the build uses one."""
    if shared := spec.get("shared"):
        from kerneldecl.store.shared import store_of_worker  # what has no shared cache does not need it

        return store_of_worker(spec["cache"], shared["url"], tuple(shared["trusted"]))
    return LocalStore(Path(spec["cache"]))


def _link(content: bytes, path: Path, kind: str) -> None:
    """Leave the object file and its library beside `path`, each whole: another worker may be making, or loading, the very same."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".link-") as scratch:
        made = Path(scratch) / path.name
        made.with_suffix(".o").write_bytes(content)
        CANDIDATE_LINKERS[kind](made.with_suffix(".so"), [made.with_suffix(".o")])
        for suffix in (".o", ".so"):
            made.with_suffix(suffix).replace(path.with_suffix(suffix))


def _compiled(mod: tvm.IRModule, arch: Arch, symbol: str, store: BlobStore) -> tuple[bytes, dict[str, Any]]:
    """Return the object file, and the fields of a `Trial` that a build record holds."""
    if arch.kind == "cpu":
        content = cpu.compile_object(mod, arch, symbol)
        return content, {"code_digest": counted_with(digest(content), content), "code_bytes": len(content)}
    compiled = cuda.compile_cuda_object(mod, arch, symbol, store)
    used = {
        "registers": max((launch.usage.registers for launch in compiled.launches), default=0),
        "smem_bytes": max((launch.usage.smem_bytes + launch.dynamic_smem_bytes for launch in compiled.launches), default=0),
        "spill_bytes": max((launch.usage.stack_bytes + launch.usage.spill_bytes for launch in compiled.launches), default=0),
    }
    return compiled.content, {"code_digest": counted_with(compiled.code, compiled.content), "code_bytes": len(compiled.content), **used}


def specialize(spec: Spec, arch: Json) -> dict[str, Any]:
    """Return how many custom kernels the workload's file returns, or what is wrong with it."""
    try:
        return {"variants": len(_custom_kernels(json.dumps(spec, sort_keys=True), json.dumps(arch, sort_keys=True)))}
    except DeclarationError as error:
        return {"failure": str(error)}


@functools.lru_cache(maxsize=1)
def _custom_kernels(spec_text: str, arch_text: str) -> tuple[cpu.ScheduledModule, ...]:
    """Return the custom kernels that the workload's file returns; raise DeclarationError where the file is to blame."""
    spec, arch = json.loads(spec_text), arch_from_json(json.loads(arch_text))
    root, path, mod = Path(spec["root"]), spec[SPECIALIZE], lowered(spec)
    results = custom_kernels(root, path, mod, arch)
    with blamed(root / path, root, "what specialize() returns cannot be used"):
        return tuple(cpu.scheduled_module(mod, _traceless_unless_replayable(each, mod)) for each in results)


def _traceless_unless_replayable(result: Any, mod: tvm.IRModule) -> Any:
    """Return a custom kernel; for a schedule of a module that the file has built itself its result, as its trace applies to no other."""
    return result.mod if isinstance(result, tvm.s_tir.Schedule) and not cpu.replays(result, mod) else result


def _scheduled(spec: Spec, mod: tvm.IRModule, candidate: Candidate, arch: Arch) -> cpu.ScheduledModule | None:
    if "rows" in spec:
        return _for_any_rows(spec, candidate, arch)
    if candidate.template != SPECIALIZE:
        return cpu.apply_candidate(Path(spec["root"]), mod, candidate, arch)
    kernels = _custom_kernels(json.dumps(spec, sort_keys=True), json.dumps(to_json(arch), sort_keys=True))
    return kernels[int(dict(candidate.params)["variant"])]  # type: ignore[arg-type]  # it is a number


def _for_any_rows(spec: Spec, candidate: Candidate, arch: Arch) -> cpu.ScheduledModule | None:
    """Return a candidate for any number of rows; None where it relies on a number, as custom kernels and traces do."""
    if candidate.template in {SPECIALIZE, TRACE}:
        return None

    def applied(on: Arch, count: int) -> tvm.IRModule | None:
        found = cpu.apply_candidate(Path(spec["root"]), _at_rows(spec, count), candidate, on)
        return None if found is None else found.mod

    apply, unit = functools.partial(applied, arch), unit_of(dict(candidate.params))
    forms = (None if on is None else functools.partial(applied, on) for on in unlimited_archs(spec, arch))
    general = next(filter(None, (for_any_rows(apply, rows_of(spec), unit, form) for form in forms)), None)
    return None if general is None else cpu.ScheduledModule(with_upto(general, spec["rows"]["upto"]), None)


def scheduled_winner(spec: Spec, candidate: Candidate, arch: Arch) -> tvm.IRModule:
    """Return the module that a recorded winner gives."""
    result = _scheduled(spec, lowered(spec), candidate, arch)
    assert result is not None, "a winner applies"
    return result.mod


def describe(spec: Spec, candidate: Json, arch: Json) -> dict[str, Any]:
    """Return what an artifact holds of a candidate beside its object file: database lines or a traceless function, and the source."""
    mod, parsed = lowered(spec), arch_from_json(arch)
    result = _scheduled(spec, mod, Candidate.from_json(candidate), parsed)
    assert result is not None, "a winner applies"
    if result.schedule:
        held = dataclasses.asdict(cpu.database_lines(result.schedule, mod, parsed))
    else:
        held = dataclasses.asdict(traceless_function(_any_rows(spec) if "rows" in spec else mod, result.mod))
    return {"database": json.dumps(held, sort_keys=True), "source": result.mod["main"].script()}


def computation(spec: Spec) -> dict[str, Any]:
    """Return a workload's computation as TVM's JSON."""
    return {"ir": tvm.ir.save_json(lowered(spec)["main"])}


def reference_of(roots: Sequence[str], asked: Json, computation: str, file: str, is_exact: bool = True) -> dict[str, Any]:
    """Return root, rule, attributes and what is said of NaN that a computation's inputs and reference come from.

    That is the rule that is asked for, of the first root where it lowers to the computation; else `tensor_ir` on `file`, which holds the
    computation as TVM's JSON. Raise ValueError where neither is so. Without `is_exact`, a rule that is there and computes something else
    is taken before the file: the kernel must then agree with what its rule and attributes say.
    """
    rule, nan = asked["rule"], asked.get("nan", "")
    others = []
    for root in roots:
        # Whatever it raises: it may be of another version, or its files may be elsewhere.
        with contextlib.suppress(Exception):
            if canonical.module_digest(_module({"root": root, **asked})) == computation:
                return {"root": root, **asked}
            others.append(root)
    if others and not is_exact:
        return {"root": others[0], **asked}
    said = {"nan": nan} if nan else {}
    carried = {"root": str(Path(file).parent), "rule": "tensor_ir", "attrs": {"file": Path(file).name}, **said}
    if not Path(file).is_file():
        raise ValueError(f"rule {rule} computes something else here, or is not here")
    if canonical.module_digest(_with_nan(canonical.lower(_rule(str(STANDARD), "tensor_ir", {"file": file})), nan)) != computation:
        raise ValueError("what is given as its computation is another one")
    return carried


def computations(databases: Sequence[str], traceless: Sequence[str], folder: str) -> dict[str, Any]:
    """Write each computation that an artifact's databases or its functions without a trace hold into `folder`, under its digest.

    `databases` are the files of the databases' workloads. Their schedules are not read: those of GPUs name intrinsics.
    """
    lines = [line for database in databases for line in Path(database).read_text(encoding="utf-8").splitlines()]
    # TVM prefixes the text with its length in eight bytes.
    held = [base64.b64decode(json.loads(line)[1])[8:].decode() for line in lines]
    held += [json.loads(Path(file).read_bytes())["workload"] for file in traceless]
    for text in held:
        mod = canonical.canonical_module(canonical.load(text)["main"])
        for nan in ("", IGNORE):  # databases hold functions as models have them, which do not say
            computed = canonical.module_digest(_with_nan(mod, nan))
            (Path(folder) / f"{computed}.json").write_text(tvm.ir.save_json(mod["main"]), encoding="utf-8")
    return {"count": len(held)}


def extract(
    root: str,
    model: str,
    sizes: Mapping[str, Sequence[int]] | None = None,
    dtype: str = "",
    targets: Sequence[Json] = (),
    rows: str = "",
) -> dict[str, Any]:
    """Return the functions of a model that entries can declare, and why the others have no entry; a problem if it is no model.

    `sizes` gives the shape buckets of dynamic dimensions, `rows` names the one whose size is known at run time: attributes have the
    answer's `marker` in its place. `dtype` is the half precision that a float32 model gets. `targets` are those that
    entries are built for, each with name, arch and policy: where they have fused kernels for other parts of the model, it has other
    functions for each.

    A function has name, the other places in the model that call it, calls, its work and iteration space, rule, attrs (those to be
    declared), identity (those that distinguish its entry from others) and the targets that it is for, none of them for all; one of rule
    tensor_ir has its IR instead of attributes. `in_parts` says what looks like a larger rule and stays several functions, and notes which
    rules have a faster form that does not fit.
    """
    from kerneldecl.compiler.graph.places import noted_of, refused_of
    from kerneldecl.compiler.model_import import fused_kernels, marked_rows, model_error, read_model

    try:
        mod, marker = marked_rows.read(model, sizes or {}, rows, dtype)
    except model_error.ModelError as error:
        return {"problem": error.sentence, "hint": error.hint}
    dims = [] if sizes else dynamic_dims(mod)
    fuses = {each["name"]: fused_kernels.by_policies(Path(root), arch_from_json(each["arch"]), each["policy"]) for each in targets}
    forms = fused_kernels.forms(mod, fuses)
    functions: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {OTHER_SIZES: f"the model takes the declared ones alone: {reason}"} if (reason := only_sizes(mod)) else {}
    for form in forms:
        left_out |= dict.fromkeys(read_model.unlowered(form.mod), "TVM lowers this operator to no TensorIR")
        left_out |= _collected(form, dims, functions)
    own = functions.values()
    described = [{**_computed(each["mod"]), **_described(Path(root), each.pop("mod"), each.pop("likely")), **each} for each in own]
    for each in list(described) if rows else ():
        if reason := marked_rows.why_not_any_rows(each, marker, rows):
            described.remove(each)
            left_out[each["name"]] = reason
    return {
        "dims": dims,
        "marker": marker,
        "functions": described,
        "left_out": [{"name": name, "reason": reason} for name, reason in left_out.items()],
        "in_parts": [{"targets": list(form.targets), "what": refused_of(form.mod), "noted": noted_of(form.mod)} for form in forms],
    }


def _collected(form: Any, dims: Sequence[str], functions: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Add the functions of a model's form to those of others, by their match digest; return why some have no entry, by name."""
    from kerneldecl.compiler.graph.places import places_of, rule_of
    from kerneldecl.compiler.model_import import read_model

    left_out, counted = {}, Counter[str]()
    outside, of_others = only_outside_buckets(form.mod), 0
    for name, func, calls in read_model.called(form.mod):
        if reason := read_model.function_problem(func):
            if name in outside:
                of_others += 1
                continue
            if dims and read_model.is_dynamic(func):
                reason = f"{reason}; {' '.join(f'--dim {dim}=1,16' for dim in dims)} has entries for these sizes"
            left_out[name] = reason
            continue
        module = canonical.canonical_module(func)
        place, *others = places_of(func) or [name]
        given = {"name": place, "places": others, "calls": 0, "mod": module, "likely": rule_of(func), "targets": []}
        matched = match_digest(module["main"])
        found = functions.setdefault(matched, given)
        found["targets"] += [target for target in form.targets if target not in found["targets"]]
        counted[matched] += calls
    for matched, calls in counted.items():
        functions[matched]["calls"] = max(functions[matched]["calls"], calls)
    if of_others:
        several = "1 function computes" if of_others == 1 else f"{of_others} functions compute"
        left_out[OTHER_SIZES] = f"{several} sizes that are not declared, by TVM's default schedule"
    return left_out


def _computed(mod: tvm.IRModule) -> dict[str, Any]:
    """Return the operations of a function, the bytes of its arguments, and its iteration space."""
    moved = sum(math.prod(shape) * dtype_bytes(dtype) for shape, dtype in canonical.signature_of(mod["main"]))
    try:
        space = iter_space(mod)
    except ValueError:  # no block outside of its root
        return {"work": {"flops": 0, "bytes": moved}, "space": None}
    return {
        "work": {"flops": sum(points(block) * block.flops_per_point for block in space.blocks), "bytes": moved},
        "space": to_json(space),
    }


def _described(root: Path, mod: tvm.IRModule, likely: tuple[str, Json] | None) -> dict[str, Any]:
    from kerneldecl.compiler.model_import.match_rules import matching_rule
    from kerneldecl.compiler.model_import.rule_candidates import RuleCandidate

    found = matching_rule(mod, root, [] if likely is None else [RuleCandidate(likely[0], dict(likely[1]))])
    if found is None:
        func = canonical.without_spans(mod["main"])
        return {"rule": "tensor_ir", "computation": canonical.module_digest(mod), "ir": tvm.ir.save_json(func)}
    candidate, identity = found
    return {"rule": candidate.rule, "attrs": candidate.attrs, "identity": identity}


def _rule(root: str, rule: str, attrs: Json) -> Rule:
    return load_rule(Path(root), rule).of(Path(root), attrs)


def lowered(spec: Spec) -> tvm.IRModule:
    """Return the workload's module; raise ValueError if it is not the computation that was planned."""
    text = json.dumps(spec, sort_keys=True)
    if text not in _LOWERED:
        mod = _module(spec)
        if canonical.module_digest(mod) != spec["computation"] or spec.get("names", "") not in {"", _names_digest(mod)}:
            raise ValueError(f"rule {spec['rule']} computes something else than when this build began; build again")
        _LOWERED.clear()
        _LOWERED[text] = mod
    return _LOWERED[text]


def _with_nan(mod: tvm.IRModule, nan: str) -> tvm.IRModule:
    """Return the module with what its entry says of NaN, if anything, among the attributes of its function."""
    return tvm.IRModule({"main": mod["main"].with_attr(ATTRIBUTE, nan)}) if nan else mod


_LOWERED: dict[str, tvm.IRModule] = {}
"""The module of the last workload spec: the candidates of a workload are built one after the other."""
