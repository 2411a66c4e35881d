"""Owns which policies a declared one stands for: `auto` and `traced` stand for all that name their place in the order.

Knows nothing of how policies choose. A policy says itself what it is for, on a line of its own in its file, which is read as text:
nothing is imported of policies that take no part.

    AUTO = {"cuda": 40}       `auto` asks it for archs of this kind, those with lower numbers first
    HAS_TRACES = False        its kernels may be PrimFuncs without a trace, which `traced` leaves out
    IS_TUNER = True           it searches what the policies of `auto` enumerate, with options of its own
    READS_RECORDS = True      a tuner that is given what was fast for like computations
    KINDS = ("cpu",)          the kinds of arch that it is for, where that is neither what AUTO says nor any
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.model import Policy, uses
from kerneldecl.plugins.find import STANDARD, plugin_file, plugin_names

_HAS_NO_TRACES = re.compile(r"^HAS_TRACES = False *(?:#.*)?$", re.MULTILINE)


class _Line(NamedTuple):
    """A line of a policy's file that is read as text."""

    name: str
    pattern: re.Pattern[str]
    example: str


_AUTO = _Line(
    "AUTO", re.compile(r"^AUTO = (\{[^}#]*\}) *(?:#.*)?$", re.MULTILINE), 'AUTO = {"cpu": 40}, with cpu, cuda or both, on one line'
)
_KINDS = _Line(
    "KINDS", re.compile(r"^KINDS = (\([^)#]*\)) *(?:#.*)?$", re.MULTILINE), 'KINDS = ("cpu",), with cpu, cuda or both, on one line'
)
_IS_TUNER = re.compile(r"^IS_TUNER = True *(?:#.*)?$", re.MULTILINE)
_READS_RECORDS = re.compile(r"^READS_RECORDS = True *(?:#.*)?$", re.MULTILINE)
_STANDS_FOR = re.compile(r'^STANDS_FOR = "(all|traced)"$', re.MULTILINE)


def policies_behind(root: Path, name: str, kind: str) -> tuple[str, ...]:
    """Return the policies that an entry asks which names `name`, in order; raise DeclarationError where there is none of the name."""
    stands_for = _STANDS_FOR.search(_text(root, name))
    if stands_for is None:
        return (name,)
    return tuple(each for _, each in sorted(_in_auto(root, kind, only_traced=stands_for[1] == "traced")))


def is_tuner(root: Path, name: str) -> bool:
    """Say whether a policy is a tuner: it has options, and is asked again with what was measured."""
    return bool(_IS_TUNER.search(_text(root, name)))


def reads_records(root: Path, name: str) -> bool:
    """Say whether a policy is a tuner that is given what records tell of like computations."""
    return bool(_READS_RECORDS.search(_text(root, name)))


def ranking_policies(root: Path, policy: Policy, kind: str) -> tuple[str, ...]:
    """Return the policies, each once, whose candidates compete where an entry's `policy` is this one: a tuner's are those of `auto`."""
    named = ("auto" if is_tuner(root, use.name) else use.name for use in uses(policy))
    return tuple(dict.fromkeys(behind for name in named for behind in policies_behind(root, name, kind)))


def why_not_for(root: Path, name: str, kind: str) -> str:
    """Return why a policy has nothing for a kind of arch, as a phrase; empty where it is for that kind or does not say."""
    kinds = kinds_of(root, name) or (kind,)
    return "" if kind in kinds else f"is for {' and '.join(_NOUNS.get(each, each) for each in kinds)}"


def kinds_of(root: Path, name: str) -> tuple[str, ...]:
    """Return the kinds of arch that a policy is for; () where it does not say. Raise DeclarationError where its line cannot be read."""
    text = _text(root, name)
    said = _said(_KINDS, name, text)
    return tuple(place_in_auto(root, name)) if said is None else tuple(said)


def place_in_auto(root: Path, name: str) -> dict[str, int]:
    """Return a policy's place in the order in which `auto` asks, by kind of arch; empty where `auto` does not ask it.

    Raise DeclarationError where the line that says so cannot be read.
    """
    return _place(name, _text(root, name))


def _place(name: str, text: str) -> dict[str, int]:
    said = _said(_AUTO, name, text)
    return {} if said is None else dict(said)


def _said(line: _Line, name: str, text: str) -> Any:
    """Return what a line of a policy's file says, None where there is none."""
    start = re.search(rf"^{line.name}\b *=", text, re.MULTILINE)
    if start is None:
        return None
    found = line.pattern.search(text)
    try:
        value = ast.literal_eval(found[1]) if found else None
    except (ValueError, SyntaxError):
        value = None
    if value is None or not set(value) <= set(_NOUNS) or not all(type(place) is int for place in getattr(value, "values", tuple)()):
        at = text.count("\n", 0, start.start()) + 1
        raise DeclarationError(
            [Problem(f"policies/{name}.py", f"{line.name} of policy {name} cannot be read", f"write {line.example}", line=at)]
        )
    return value


_NOUNS = {"cpu": "CPUs", "cuda": "GPUs"}


@functools.cache  # what a process has imported of kerneldecl stays as it is; all files of policies are read for it
def standard_order(kind: str) -> tuple[str, ...]:
    """Return the standard policies that `auto` asks for archs of a kind, in order."""
    return policies_behind(STANDARD, "auto", kind)


def _in_auto(root: Path, kind: str, *, only_traced: bool) -> Iterator[tuple[int, str]]:
    for name in plugin_names("policies", root):
        text = _text(root, name)
        places = _place(name, text)
        if kind in places and not (only_traced and _HAS_NO_TRACES.search(text)):
            yield int(places[kind]), name


def _text(root: Path, name: str) -> str:
    return plugin_file("policies", root, name).read_text(encoding="utf-8")
