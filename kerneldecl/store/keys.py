"""Owns manifests and keys: the one place that says which inputs a result depends on.

Knows nothing of files, of where results are kept, or of what the actions do.

A manifest is sorted text, a line for each input (`attrs.m = 4096`). A key is its SHA-256. The hasher, `kerneldecl why`
and the tests read the same text, so a key and its explanation cannot disagree.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from json import JSONEncoder
from json.encoder import encode_basestring_ascii
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

from kerneldecl.model import Arch, Workload
from kerneldecl.rows import rows_field

_ENCODER = JSONEncoder(separators=(",", ":"))
_LEAVES = frozenset({float, bool, tuple})
CODEGEN = 6
"""Rises when a module of compiler/ makes other code of the same scheduled module."""
FLOAT8_INSTRUCTIONS = (8, 9)
"""The first compute capability with conversions of float8. Code for earlier ones was once made with TVM's own arithmetic, then by CUDA's
headers."""
KEY_VERSION = 1
"""Rises when the meaning of a manifest changes; CHANGELOG.md says what that invalidates."""
_BUILT_WITH = (
    "wgmma_arch",  # some templates are compiled for it instead
    "compute_capability",  # whether launches overlap, and how they spread blocks and prefetch then (compiler/passes)
    "sm_count",
    "max_blocks_per_sm",
    "max_threads_per_sm",
    "smem_per_sm_bytes",
    "smem_per_block_optin_bytes",
    "smem_reserved_per_block_bytes",
)
"""Values of a GPU that a scheduled module is compiled with."""

_COMPILERS: Mapping[str, tuple[str, ...]] = {"cpu": ("tvm", "tvm_ffi"), "cuda": ("tvm", "tvm_ffi", "cuda")}
"""Tools that code for a kind of arch depends on."""

Fields = Mapping[str, object]


class Candidates(NamedTuple):
    """What competes for a computation, as its tune manifest has it."""

    lists: Mapping[str, str] = MappingProxyType({})
    """Count and digest of what each policy proposes, by the policy's place and name."""
    templates: Mapping[str, str] = MappingProxyType({})
    """Digests of the templates that the candidates name, and of the file with the user's custom kernels."""
    names: str = ""
    """Digest of the names in the computation; empty where they are not known."""


def digest(content: bytes) -> str:
    """Return the SHA-256 of content in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def manifest(action: str, fields: Fields) -> str:
    """Return the manifest: nested mappings become dotted names, values are JSON, lines are sorted."""
    lines = [f'action = "{action}"\n', f"version = {KEY_VERSION}\n"]
    _write("", fields, lines)
    lines.sort()
    return "".join(lines)


def _write(prefix: str, fields: Fields, lines: list[str]) -> None:
    # Most values are strings and whole numbers, for which the general way is ten times slower.
    for name, value in fields.items():
        kind = type(value)
        if kind is str:
            lines.append(f"{prefix}{name} = {encode_basestring_ascii(value)}\n")  # type: ignore[arg-type]  # just checked
        elif kind is int:
            lines.append(f"{prefix}{name} = {value}\n")
        elif kind not in _LEAVES and isinstance(value, Mapping):
            _write(f"{prefix}{name}.", value, lines)
        else:
            lines.append(f"{prefix}{name} = {_json(value)}\n")


def _written(action: str, values: Mapping[str, str], common: str = "") -> str:
    """Return the manifest of values as JSON by their dotted names, and of lines that are written already: what `manifest` returns, in a
    fifth of the time, since the names of ten thousand manifests are the same."""
    pieces, names = _layout(action, tuple(values), common)
    text = list(pieces)
    text[1::2] = [values[name] for name in names]
    return "".join(text)


@functools.lru_cache(maxsize=1024)
def _layout(action: str, names: tuple[str, ...], common: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the text before, between and behind the values, with a place for each, and the names of these in their order."""
    fixed = f'action = "{action}"\nversion = {KEY_VERSION}\n{common}'.splitlines(keepends=True)
    opened = {f"{name} = ": name for name in names}
    pieces = [""]
    for line in sorted((*fixed, *opened)):
        pieces[-1] += line
        pieces += ["", "\n"] if line in opened else []
    return pieces, tuple(opened[line] for line in sorted(opened))


def _json(value: object) -> str:
    kind = type(value)
    if kind is str:
        return encode_basestring_ascii(value)  # type: ignore[arg-type]  # just checked
    if kind is int or (kind is float and isfinite(value)):  # type: ignore[arg-type]  # just checked
        return repr(value)
    if kind is tuple and {*map(type, value)} == {int}:  # type: ignore[call-overload]  # just checked
        return f"[{','.join(map(str, value))}]"  # type: ignore[call-overload]  # just checked
    return _ENCODER.encode(value)


def _lines_of(prefix: str, fields: Fields) -> str:
    lines: list[str] = []
    _write(prefix, fields, lines)
    return "".join(lines)


def key(text: str) -> str:
    """Return the key of a manifest."""
    return digest(text.encode())


def changed_lines(old: str, new: str) -> list[tuple[str, str | None, str | None]]:
    """Return (name, old value, new value) of every line that differs; None where a manifest lacks the name."""
    before, after = lines_of(old), lines_of(new)
    names = sorted(before.keys() | after.keys())
    return [(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]


def lines_of(text: str) -> dict[str, str]:
    """Return the values of a manifest, as JSON, by their names."""
    return dict(line.split(" = ", 1) for line in text.splitlines() if " = " in line)


def lower_manifest(workload: Workload, rule_digest: str, files: Mapping[str, str], toolchain: Mapping[str, str]) -> str:
    """Return what the lowered computation depends on. `files` holds the digests of the files that attributes name."""
    values = {**_declared(workload.attrs), **{f"files.{name}": _json(found) for name, found in files.items()}}
    rows = workload.rows if rows_field(workload.rows, workload.attrs) else None
    varying = (("rows.attribute", rows.attribute), ("rows.place", rows.place), ("rows.upto", rows.upto)) if rows else ()
    common = _common((("rule", rule_digest), ("toolchain.tvm", toolchain["tvm"]), *workload.nan_field.items(), *varying))
    return _written("lower", values, common)


def verify_key(workload: Workload, reference_digest: str, files: Mapping[str, str], protocol: Fields) -> str:
    """Return the digest of what a verdict depends on besides the kernel: what inputs and reference come from, and the protocol."""
    values = _declared(workload.attrs)
    if files:
        kept = {name: value for name, value in values.items() if name.removeprefix("attrs.") not in files}
        values = {**kept, **{f"files.{name}": _json(found) for name, found in files.items()}}
    return key(_written("verify", values, _common((("rule", reference_digest), *protocol.items()))))


@functools.lru_cache(maxsize=256)
def _common(fields: tuple[tuple[str, object], ...]) -> str:
    """Return the lines of what many entries share."""
    return _lines_of("", dict(fields))


def _declared(attrs: tuple[tuple[str, object], ...]) -> Mapping[str, str]:
    """Return a workload's attributes as JSON, by the names of their lines. Nothing is cached by them: 1, 1.0 and true are equal keys."""
    return {f"attrs.{name}": _json(value) for name, value in attrs}


def propose_manifest(computation: str, arch: Arch, top_k: int, policies: Mapping[str, str], declared: Fields = MappingProxyType({})) -> str:
    """Return what the list of candidates depends on: `policies` gives the digest of each policy that is asked.

    `declared` is what else counts of the declaration: where `policy` is more than a name, whose policies say it all.
    """
    values = {"computation": _json(computation)} | {name: _json(value) for name, value in declared.items()}
    return _written("propose", values, _asked_lines(arch, top_k, tuple(policies.items())))


@functools.lru_cache(maxsize=256)
def _asked_lines(arch: Arch, top_k: int, policies: tuple[tuple[str, str], ...]) -> str:
    return _lines_of("", {"arch": arch_fields(arch), "policies": dict(policies), "top_k": top_k})


def tune_manifest(computation: str, arch: Arch, search: Fields, candidates: Candidates, toolchain: Mapping[str, str]) -> str:
    """Return what the choice of a candidate depends on.

    `computation` is the digest of the canonical TensorIR, `search` the settings of the search.
    """
    values = {"computation": computation, **named(candidates.names), **{f"search.{name}": value for name, value in search.items()}}
    tools = tuple([toolchain[name] for name in _COMPILERS[arch.kind]])
    made_with = _made_with(arch, tools, tuple(candidates.lists.items()), tuple(candidates.templates.items()))
    return _written("tune", {name: _json(value) for name, value in values.items()}, made_with)


@functools.lru_cache(maxsize=256)
def _made_with(arch: Arch, tools: tuple[str, ...], lists: tuple[tuple[str, str], ...], templates: tuple[tuple[str, str], ...]) -> str:
    """Return the lines of a device, of the tools of its kind, of lists of candidates, and of templates."""
    device = {**device_fields(arch), **{name: getattr(arch.gpu, name) for name in _BUILT_WITH if arch.gpu}}
    toolchain = dict(zip(_COMPILERS[arch.kind], tools, strict=True))
    fields = {"arch": device, **_codegen(arch), "toolchain": toolchain, "candidates": dict(lists), "templates": dict(templates)}
    return _lines_of("", fields)


def _codegen(arch: Arch) -> dict[str, object]:
    """Return what tells of the code that the compiler makes of a scheduled module.

    With float8 by bits, bfloat16 is left to headers where there are no instructions for it.
    """
    is_converted = arch.gpu is not None and arch.gpu.compute_capability < FLOAT8_INSTRUCTIONS
    return {"codegen": CODEGEN, **({"float8": "bits"} if is_converted else {})}


def rows_manifest(kernels: Mapping[int, str], upto: int, search: Fields, arch: Arch) -> str:
    """Return what the choice among kernels by their rows depends on: their object keys by the number that each is tuned for."""
    objects = {str(rows): key for rows, key in kernels.items()}
    return manifest("rows", {"kernels": objects, "upto": upto, "search": search, "arch": device_fields(arch)})


def build_manifest(scheduled: str, symbol: str, arch: Arch, toolchain: Mapping[str, str], names: str = "") -> str:
    """Return what an object file depends on. `scheduled` is the digest of the scheduled module whatever its names, `names` of these."""
    target: Fields = {"target": dict(arch.tvm_target)}
    if arch.gpu:
        target = {**target, **{name: getattr(arch.gpu, name) for name in _BUILT_WITH}}
    fields = {"scheduled": scheduled, "symbol": symbol, "arch": target, **named(names)}
    return manifest("build", {**fields, **_codegen(arch), "toolchain": compilers(arch, toolchain)})


def named(names: str) -> dict[str, str]:
    """Return the line of a manifest that tells of names in a computation; none where they are not known."""
    return {"names": names} if names else {}


def object_key(schedule_digest: str, object_digest: str) -> str:
    """Return the key under which plans know a winner's object file."""
    return key(f"{schedule_digest} {object_digest}")


def symbol(computation: str) -> str:
    """Return the symbol of a computation's kernel; one computation has one symbol, whatever schedule implements it."""
    return f"kd_{computation[:20]}"


def measure_manifest(code: str, arch: Arch, protocol: Fields) -> str:
    """Return what a measurement depends on. `code` is the digest of the generated code; two candidates may share it."""
    return _written("measure", {"code": _json(code)}, _measured_on(arch, tuple(protocol.items())))


@functools.lru_cache(maxsize=256)
def _measured_on(arch: Arch, protocol: tuple[tuple[str, object], ...]) -> str:
    """Return the lines of a device and of how it measures."""
    return _lines_of("", {"arch": device_fields(arch), "protocol": dict(protocol)})


def device_fields(arch: Arch) -> dict[str, object]:
    """Return what timings hold for: the device's model, the target, and the cores that kernels for a CPU run on.

    An arch's other figures steer policies alone.
    """
    cores = {"cores": arch.cpu.cores} if arch.cpu else {}
    return {"kind": arch.kind, "model": arch.model, "target": dict(arch.tvm_target), **cores}


def link_manifest(
    name: str, version: str, target: str, entries: Mapping[str, str], missing: Mapping[str, str], *, has_headers: bool = False
) -> str:
    """Return what an artifact depends on.

    `entries` gives a digest of what the artifact says and holds of each entry, by name; `missing` why an entry is left out.
    """
    artifact = {"name": name, "version": version, "target": target, **({"headers": True} if has_headers else {})}
    return manifest("link", {"artifact": artifact, "entries": dict(entries), "missing": dict(missing)})


@functools.cache
def arch_fields(arch: Arch) -> Mapping[str, object]:
    """Return the values of an arch that results depend on: all but its name, how it was found and which toolkits know it."""
    fields = {"kind": arch.kind, "model": arch.model, "target": dict(arch.tvm_target)}
    return {**fields, "cpu" if arch.cpu else "gpu": {name: _by_dtype(value) for name, value in vars(arch.device).items()}}


def _by_dtype(value: object) -> object:
    """Return pairs of names and values, such as rates by dtype, as a mapping: each has its own line of a manifest."""
    is_pairs = isinstance(value, tuple) and all(isinstance(item, tuple) for item in value)
    return dict(value) if is_pairs else value  # type: ignore[call-overload]  # just checked


def compilers(arch: Arch, toolchain: Mapping[str, str]) -> dict[str, str]:
    """Return the tools of the toolchain that code for an arch depends on."""
    return {name: toolchain[name] for name in _COMPILERS[arch.kind]}
