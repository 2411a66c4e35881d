"""Owns what nvcc runs to make a cubin: its front end and its assembler, as nvcc itself lists them, and running these alone.

Knows nothing of kernels, headers or of where compilers are.

nvcc has a host compiler preprocess a source. A source without headers does not need that: the front end reads directives too. It gets
the macros that nvcc defines for the preprocessor in front of the source. For a small kernel, nvcc itself and the preprocessor take as
long as the assembler.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import string
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SOURCE, OUTPUT = "kernel.cu", "kernel.out"
"""The names by which nvcc knows a source, and what it makes of it."""
LISTED = ("--dryrun", "--keep")
"""nvcc's flags to list what it would run, with files named after the source."""
_PREPROCESSED = "kernel.cpp1.ii"
_VARIABLE = re.compile(r"(?P<name>\w+)=(?P<value>.*)")
_WITH_VALUE = frozenset({"-D", "-U", "-I", "-isystem", "-include", "-x", "-o"})
_SEEN_BY_NOBODY = re.compile(r"-(?:std=|O\d|w$|E$|m64$|I|isystem|x|o)")
"""Options of a preprocessor that change nothing where nothing is included."""
_HEADER = "cuda_runtime.h"
"""What nvcc includes; `nvcc.compile_cubin` says that it has been read."""
_CONDITION = re.compile(r"#[ \t]*(?:if|ifdef|ifndef|elif)\b(?P<text>(?:[^\n]*\\\n)*[^\n]*)")
_DEFINED = re.compile(r"#[ \t]*define[ \t]+(?P<name>\w+)")
"""Wherever in a line: that is found sooner than at its beginning."""
_COMPILERS_OWN = re.compile(r"\b__\w+")


@dataclass(frozen=True)
class Steps:
    """The commands that make a cubin of a source without headers."""

    variables: Mapping[str, str] = field(repr=False)
    """Variables that nvcc sets for them."""
    macros: str = field(repr=False)
    """Directives in the place of the preprocessor's options."""
    commands: tuple[tuple[str, ...], ...]


def steps_of(listed: str) -> Steps | None:
    """Return the steps in what nvcc lists; None where there are others than preprocessor, front end and assembler."""
    lines = [line.removeprefix("#$ ") for line in listed.splitlines() if line.startswith("#$ ")]
    variables = {found["name"]: found["value"].strip() for line in lines if (found := _VARIABLE.fullmatch(line))}
    commands = [shlex.split(string.Template(line).safe_substitute(variables)) for line in lines if not _VARIABLE.fullmatch(line)]
    if len(commands) != 3 or commands[0][-1] != _PREPROCESSED or _PREPROCESSED not in commands[1] or commands[2][-1] != OUTPUT:
        return None
    macros = list(_macros(commands[0][1:-2]))
    tools = [shutil.which(command[0], path=variables.get("PATH")) for command in commands[1:]]
    if None in macros or None in tools:
        return None
    run = ((str(tool), *command[1:]) for tool, command in zip(tools, commands[1:], strict=True))
    return Steps(variables, "".join(f"{each}\n" for each in macros), tuple(run))


def _macros(options: Sequence[str]) -> Iterator[str | None]:
    """Yield the directives that stand for a preprocessor's options; None where there is none for an option."""
    waiting = iter(options)
    for option in waiting:
        name = next((each for each in ("-D", "-U") if option.startswith(each)), option)
        value = next(waiting, "") if option in _WITH_VALUE else option.removeprefix(name)
        if name == "-D":
            defined, _, as_what = value.partition("=")
            yield f"#define {defined} {as_what if '=' in value else '1'}"
        elif name == "-U":
            yield f"#undef {value}"
        elif not (_SEEN_BY_NOBODY.match(option) or (option, value) == ("-include", _HEADER) or option == SOURCE):
            yield None


def suits(steps: Steps, text: str) -> bool:
    """Say whether no condition in a source, which includes nothing, asks for a macro that a preprocessor may define by itself."""
    whole = steps.macros + text
    defined = {found["name"] for found in _DEFINED.finditer(whole)}
    return all(name in defined for found in _CONDITION.finditer(whole) for name in _COMPILERS_OWN.findall(found["text"]))


def compiled(steps: Steps, text: str) -> tuple[bytes, str] | None:
    """Return what the steps make of a source without headers, and what they report; None where one fails."""
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _PREPROCESSED).write_text(f'{steps.macros}# 1 "{SOURCE}"\n{text}', encoding="utf-8")
        for command in steps.commands:
            environment = {**os.environ, **steps.variables}
            result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                return None
            reports.append(result.stderr)
        return (Path(folder) / OUTPUT).read_bytes(), "".join(reports)
