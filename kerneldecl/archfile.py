"""Owns the file format of archs: `archs/*.toml` -> Arch, with every mistake at once.

Knows nothing of where the files lie nor of what policies do with the figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import tomli

from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.locate import Path, key_lines, line_of
from kerneldecl.model import Arch, Cpu, frozen
from kerneldecl.wording import show, unknown

_KINDS = ("cpu", "cuda")
_CPU_TYPES = {field.name: field.type for field in dataclasses.fields(Cpu)}
_CAN_BE_ZERO = frozenset({"l3_bytes"})


def read_arch(name: str, content: bytes, shown: str) -> Arch:
    """Return the arch that a file's content describes; raise DeclarationError, its problems located in `shown`, where it is wrong."""
    try:
        text = content.decode()
        table = tomli.loads(text)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DeclarationError([Problem(shown, line, "", f"byte 0x{content[error.start]:02x} is not UTF-8")]) from None
    except tomli.TOMLDecodeError as error:
        raise DeclarationError([Problem(shown, error.lineno, "", f"not TOML: {error.msg} (column {error.colno})")]) from None
    found = list(_mistakes(table))
    if found:
        lines = key_lines(text)
        problems = [Problem(shown, line_of(lines, path), "", sentence, hint) for path, sentence, hint in found]
        raise DeclarationError(sorted(problems, key=lambda problem: problem.line))
    target = tuple(sorted((key, frozen(value)) for key, value in table["tvm_target"].items()))
    cpu: dict[str, Any] = {key: float(value) if _CPU_TYPES[key] == "float" else value for key, value in table["cpu"].items()}
    return Arch(name, table["kind"], table.get("model", ""), target, Cpu(**cpu))


def _mistakes(table: Mapping[str, Any]) -> Iterator[tuple[Path, str, str]]:
    """Yield where each mistake is, its sentence and its hint."""
    known = ("kind", "model", "tvm_target", "cpu")
    yield from (((key,), *unknown("key", key, known)) for key in table if key not in known)
    if table.get("kind") not in _KINDS:
        yield ("kind",), *unknown("kind", table.get("kind", ""), _KINDS)
    if not isinstance(table.get("model", ""), str):
        yield ("model",), f"model is {show(table['model'])}; expected a string", ""
    yield from _target_mistakes(table.get("tvm_target", {}))
    yield from _cpu_mistakes(table.get("cpu", {}))


def _target_mistakes(target: object) -> Iterator[tuple[Path, str, str]]:
    if not isinstance(target, dict) or not isinstance(target.get("kind"), str):
        yield ("tvm_target",), "tvm_target is not a table that holds TVM's target", 'a CPU\'s is kind = "llvm", mcpu = "…"'
        return
    for key, value in target.items():
        try:
            frozen(value)
        except TypeError:
            yield ("tvm_target", key), f"{key} is {show(value)}; expected a string, a number, a boolean or a list of them", ""


def _cpu_mistakes(cpu: object) -> Iterator[tuple[Path, str, str]]:
    if not isinstance(cpu, dict):
        yield ("cpu",), f"cpu is {show(cpu)}; expected a table", ""
        return
    yield from ((("cpu", key), *unknown("key", key, _CPU_TYPES)) for key in cpu if key not in _CPU_TYPES)
    for key, kind in _CPU_TYPES.items():
        if key not in cpu:
            yield ("cpu",), f"key {key} of [cpu] is missing", ""
            continue
        value = cpu[key]
        is_right = type(value) is int or (kind == "float" and type(value) is float)
        if not is_right or not 0 <= value < float("inf") or (value == 0 and key not in _CAN_BE_ZERO):
            noun = "a number" if kind == "float" else "an integer"
            yield ("cpu", key), f"{key} is {show(value)}; expected {noun} {'of at least 0' if key in _CAN_BE_ZERO else 'above 0'}", ""
