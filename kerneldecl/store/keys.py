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

from kerneldecl.model import Arch, Workload

_ENCODER = JSONEncoder(separators=(",", ":"))
_LEAVES = frozenset({float, bool, tuple})
CODEGEN = 6
"""Rises when a module of compiler/ makes other code of the same scheduled module."""
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

Fields = Mapping[str, object]


def digest(content: bytes) -> str:
    """Return the SHA-256 of content in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def manifest(action: str, fields: Fields) -> str:
    """Return the manifest: nested mappings become dotted names, values are JSON, lines are sorted."""
    lines = [f'action = "{action}"\n', f"version = {KEY_VERSION}\n"]
    _write("", fields, lines)
    lines.sort()
    return "".join(lines)


class Lines(tuple[str, ...]):
    """Lines of a manifest that many have in common, written already: as a value, they stand for the fields that they are of."""

    __slots__ = ()

    @classmethod
    def of(cls, prefix: str, fields: Fields) -> Lines:
        lines: list[str] = []
        _write(prefix, fields, lines)
        return cls(lines)


def _write(prefix: str, fields: Fields, lines: list[str]) -> None:
    # Most values are strings and whole numbers, for which the general way is ten times slower.
    for name, value in fields.items():
        kind = type(value)
        if kind is str:
            lines.append(f"{prefix}{name} = {encode_basestring_ascii(value)}\n")  # type: ignore[arg-type]  # just checked
        elif kind is int:
            lines.append(f"{prefix}{name} = {value}\n")
        elif kind is Lines:
            lines.extend(value)  # type: ignore[arg-type]  # just checked
        elif kind not in _LEAVES and isinstance(value, Mapping):
            _write(f"{prefix}{name}.", value, lines)
        else:
            lines.append(f"{prefix}{name} = {_ENCODER.encode(value)}\n")


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
    fields = {"rule": rule_digest, "attrs": dict(workload.attrs), **workload.nan_field}
    return manifest("lower", {**fields, "files": dict(files), "toolchain": {"tvm": toolchain["tvm"]}})


def propose_manifest(computation: str, arch: Arch, top_k: int, policies: Mapping[str, str]) -> str:
    """Return what the list of candidates depends on: `policies` gives the digest of each policy that is asked."""
    before, after = _around_computation(arch, top_k, tuple(policies.items()))
    return f"{before}{computation}{after}"


@functools.lru_cache(maxsize=64)
def _around_computation(arch: Arch, top_k: int, policies: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Return what stands before and behind the computation's digest in every propose manifest of these inputs."""
    text = manifest("propose", {"computation": "", "arch": arch_fields(arch), "top_k": top_k, "policies": dict(policies)})
    before, line, after = text.partition('\ncomputation = "')
    return f"{before}{line}", after


def tune_manifest(computation: str, arch: Arch, search: Fields, candidates: Fields, toolchain: Mapping[str, str]) -> str:
    """Return what the choice of a candidate depends on.

    `computation` is the digest of the canonical TensorIR, `search` the settings of the search, `candidates` what is proposed and the
    digests of the templates that make kernels of it.
    """
    fields = {"computation": computation, "arch": _device_lines(arch), "search": search, **candidates}
    return manifest("tune", {**fields, "codegen": CODEGEN, "toolchain": compilers(arch, toolchain)})


def build_manifest(scheduled: str, symbol: str, arch: Arch, toolchain: Mapping[str, str], names: str = "") -> str:
    """Return what an object file depends on. `scheduled` is the digest of the scheduled module whatever its names, `names` of these."""
    target: Fields = {"target": dict(arch.tvm_target)}
    if arch.gpu:
        target = {**target, **{name: getattr(arch.gpu, name) for name in _BUILT_WITH}}
    fields = {"scheduled": scheduled, "symbol": symbol, "arch": target, **named(names)}
    return manifest("build", {**fields, "codegen": CODEGEN, "toolchain": compilers(arch, toolchain)})


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
    return manifest("measure", {"code": code, "arch": device_fields(arch), "protocol": dict(protocol)})


def device_fields(arch: Arch) -> dict[str, object]:
    """Return what timings hold for: the device's model, the target, and the cores that kernels for a CPU run on.

    An arch's other figures steer policies alone.
    """
    cores = {"cores": arch.cpu.cores} if arch.cpu else {}
    return {"kind": arch.kind, "model": arch.model, "target": dict(arch.tvm_target), **cores}


def link_manifest(name: str, version: str, target: str, entries: Mapping[str, str], missing: Mapping[str, str]) -> str:
    """Return what an artifact depends on.

    `entries` gives a digest of what the artifact says and holds of each entry, by name; `missing` why an entry is left out.
    """
    artifact = {"name": name, "version": version, "target": target}
    return manifest("link", {"artifact": artifact, "entries": dict(entries), "missing": dict(missing)})


@functools.cache
def arch_fields(arch: Arch) -> Mapping[str, object]:
    """Return the values of an arch that results depend on: all but its name, how it was found and which toolkits know it."""
    fields = {"kind": arch.kind, "model": arch.model, "target": dict(arch.tvm_target)}
    return {**fields, "cpu" if arch.cpu else "gpu": {name: _by_dtype(value) for name, value in vars(arch.device).items()}}


@functools.cache
def _device_lines(arch: Arch) -> Lines:
    return Lines.of("arch.", {**device_fields(arch), **{name: getattr(arch.gpu, name) for name in _BUILT_WITH if arch.gpu}})


def _by_dtype(value: object) -> object:
    """Return pairs of names and values, such as rates by dtype, as a mapping: each has its own line of a manifest."""
    is_pairs = isinstance(value, tuple) and all(isinstance(item, tuple) for item in value)
    return dict(value) if is_pairs else value  # type: ignore[call-overload]  # just checked


def compilers(arch: Arch, toolchain: Mapping[str, str]) -> dict[str, str]:
    """Return the tools of the toolchain that code for an arch depends on."""
    names = ("tvm", "tvm_ffi") if arch.kind == "cpu" else ("tvm", "tvm_ffi", "cuda")
    return {name: toolchain[name] for name in names}
