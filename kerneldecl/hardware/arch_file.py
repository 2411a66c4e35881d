"""Owns the file format of archs: it reads `archs/*.toml` as Arch, and reports all mistakes at once.

Knows nothing of where the files are or of what policies do with the figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tomli

from kerneldecl.diagnostics.line_numbers import Path, key_lines, line_of
from kerneldecl.diagnostics.messages import show, unknown
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.model import Arch, Cpu, Gpu, frozen
from kerneldecl.toolchain.versions import cuda_release

Mistake = tuple[Path, str, str]
"""Path in the document, message, hint."""
FIRST_CAPABILITY = (7, 5)
"""First compute capability that CUDA 13 serves (its release notes), with which TVM 0.27's CUDA runtime is made."""
_DEVICES: Mapping[str, tuple[str, type[Cpu | Gpu]]] = {"cpu": ("cpu", Cpu), "cuda": ("gpu", Gpu)}
"""Table and type of the device, by the arch's kind."""
_CAN_BE_ZERO = frozenset({"l3_bytes", "smem_reserved_per_block_bytes"})


def _is_number(value: object) -> bool:
    return type(value) in {int, float} and 0 < value < float("inf")  # type: ignore[operator]  # both are numbers


# A check of the value, and the phrase for what was expected, by the field's type.
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: type(value) is int and value > 0, "an integer above 0"),
    "float": (_is_number, "a number above 0"),
    "bool": (lambda value: type(value) is bool, "true or false"),
    "str": (lambda value: type(value) is str, "a string"),
    "Rates": (
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        "a table of numbers above 0, such as {float32 = 6.7e13}",
    ),
    "tuple[int, int]": (
        lambda value: isinstance(value, list) and len(value) == 2 and all(type(part) is int and part >= 0 for part in value),
        "two integers, such as [9, 0]",
    ),
}


def read_arch(name: str, content: bytes, shown: str) -> Arch:
    """Return the arch that a file describes; raise DeclarationError with all mistakes, located in the file name `shown`."""
    try:
        text = content.decode()
        table = tomli.loads(text)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DeclarationError([Problem(shown, f"byte 0x{content[error.start]:02x} is not UTF-8", line=line)]) from None
    except tomli.TOMLDecodeError as error:
        raise DeclarationError([Problem(shown, f"not TOML: {error.msg} (column {error.colno})", line=error.lineno)]) from None
    found = list(_mistakes(table))
    if found:
        lines = key_lines(text)
        problems = [Problem(shown, sentence, hint, line=line_of(lines, path)) for path, sentence, hint in found]
        raise DeclarationError(sorted(problems, key=lambda problem: problem.line))
    target = tuple(sorted((key, frozen(value)) for key, value in table["tvm_target"].items()))
    device = {key: _read(key, value) for key, value in table[_DEVICES[table["kind"]][0]].items()}
    toolkits = {key: table[key] for key in ("cuda_min", "cuda_max") if key in table}
    tags = tuple(table.get("tvm_tags", ()))
    if table["kind"] == "cpu":
        return Arch(name, "cpu", table.get("model", ""), target, cpu=Cpu(**device))
    return Arch(name, "cuda", table.get("model", ""), target, gpu=Gpu(**device), tvm_tags=tags, **toolkits)


_TYPES = {field.name: str(field.type) for device in (Cpu, Gpu) for field in dataclasses.fields(device)}


def _read(key: str, value: Any) -> Any:
    """Return a valid value as the model holds it."""
    if _TYPES[key] == "Rates":
        return tuple(sorted((dtype, float(rate)) for dtype, rate in value.items()))
    return float(value) if _TYPES[key] == "float" else frozen(value)


def _mistakes(table: Mapping[str, Any]) -> Iterator[Mistake]:
    kind = table.get("kind", "")
    if kind not in _DEVICES:
        # What else a file must have depends on it.
        wrong = f"unknown kind {show(kind)}" if "kind" in table else "kind is missing"
        way_out = "`kerneldecl doctor --propose-arch` writes the file of this machine's GPU"
        yield ("kind",), f"{wrong}; expected cpu, or cuda for a GPU", way_out
        return
    tables = [_DEVICES[kind][0]]
    known = ("kind", "model", *(("tvm_tags", "cuda_min", "cuda_max") if kind == "cuda" else ()), "tvm_target", *tables)
    yield from (((key,), *unknown("key", key, known)) for key in table if key not in known)
    if not isinstance(table.get("model", ""), str):
        yield ("model",), f"model is {show(table['model'])}; expected a string", ""
    tags = table.get("tvm_tags", []) if kind == "cuda" else []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        yield ("tvm_tags",), f'tvm_tags is {show(tags)}; expected a list of TVM\'s target tags, such as ["nvidia/nvidia-t4"]', ""
    target = list(_target_mistakes(table.get("tvm_target", {})))
    yield from target
    for name in tables:
        figures = list(_device_mistakes(name, table.get(name, {})))
        yield from figures
        if name == "gpu" and not target and not figures:
            yield from _disagreements(table["tvm_target"], table["gpu"])
    yield from _toolkit_mistakes(table) if kind == "cuda" else ()


def _target_mistakes(target: object) -> Iterator[Mistake]:
    if not isinstance(target, dict) or not isinstance(target.get("kind"), str):
        hint = 'a CPU\'s is kind = "llvm", mcpu = "…", a GPU\'s kind = "cuda", arch = "sm_…"'
        yield ("tvm_target",), "tvm_target is not a table that holds TVM's target", hint
        return
    for key, value in target.items():
        try:
            frozen(value)
        except TypeError:
            yield ("tvm_target", key), f"{key} is {show(value)}; expected a string, a number, a boolean or a list of them", ""


def _device_mistakes(name: str, figures: object) -> Iterator[Mistake]:
    """Yield the mistakes of the table `[cpu]` or `[gpu]`."""
    fields = {field.name: field for kind, device in _DEVICES.values() if kind == name for field in dataclasses.fields(device)}
    if not isinstance(figures, dict):
        yield (name,), f"{name} is {show(figures)}; expected a table", ""
        return
    yield from (((name, key), *unknown("key", key, fields)) for key in figures if key not in fields)
    missing = [key for key, field in fields.items() if key not in figures and field.default is dataclasses.MISSING]
    if missing:
        noun = f"key {missing[0]} of [{name}] is" if len(missing) == 1 else f"keys {', '.join(missing)} of [{name}] are"
        yield (name,), f"{noun} missing", "`kerneldecl archs` names files to start from"
    for key, field in ((key, field) for key, field in fields.items() if key in figures):
        is_right, expected = _VALUES[str(field.type)]
        if key in _CAN_BE_ZERO:
            if not (is_right(figures[key]) or (type(figures[key]) is int and figures[key] == 0)):
                yield (name, key), f"{key} is {show(figures[key])}; expected {expected.replace('above', 'of at least')}", ""
        elif not is_right(figures[key]):
            yield (name, key), f"{key} is {show(figures[key])}; expected {expected}", ""


def _disagreements(target: Mapping[str, Any], gpu: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yield where [tvm_target], which TVM reads, contradicts [gpu], which policies read, and a GPU that TVM's runtime does not serve."""
    major, minor = gpu["compute_capability"]
    if (major, minor) < FIRST_CAPABILITY:
        served = "{}.{} and later".format(*FIRST_CAPABILITY)
        sentence = f"compute_capability is [{major}, {minor}]; TVM's CUDA runtime, made with CUDA 13, serves {served}"
        yield ("gpu", "compute_capability"), sentence, ""
    same = {
        "kind": "cuda",
        "arch": f"sm_{major}{minor}",
        "thread_warp_size": gpu["warp_size"],
        "max_threads_per_block": gpu["max_threads_per_block"],
        "max_shared_memory_per_block": gpu["smem_per_block_optin_bytes"],
        "l2_cache_size_bytes": gpu["l2_bytes"],
    }
    for key, value in same.items():
        if key not in target:
            yield ("tvm_target",), f"key {key} of [tvm_target] is missing; [gpu] makes it {show(value)}", ""
        elif target[key] != value:
            yield ("tvm_target", key), f"{key} is {show(target[key])}; [gpu] makes it {show(value)}", ""


def _toolkit_mistakes(table: Mapping[str, Any]) -> Iterator[Mistake]:
    if "cuda_min" not in table:
        yield (), "key cuda_min is missing; expected the first CUDA toolkit that compiles for the GPU", ""
    for key in ("cuda_min", "cuda_max"):
        value = table.get(key, "1")
        if not isinstance(value, str) or cuda_release(value) is None:
            yield (key,), f'{key} is {show(value)}; expected a version in quotes, such as "12.9"', ""
