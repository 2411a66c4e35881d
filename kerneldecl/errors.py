"""Owns the errors that end a command, their exit codes, and how a user's mistake is rendered.

Knows nothing of where mistakes are found, nor of the command line that prints them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Every exit code of the command line."""

    DONE = 0
    FAILED = 1
    """One or more entries failed."""
    USAGE = 2
    """The command line or a declaration is wrong."""
    STALE = 3
    NO_MATCH = 4
    """No entry matches the pattern."""
    INTERNAL = 5
    INTEGRITY = 6
    """An artifact or a store entry does not match its digests."""
    VERIFICATION = 7
    """A kernel disagrees with its reference."""
    LOCK_HELD = 9
    """Another process holds a lock and --no-wait was given."""
    ENVIRONMENT = 10
    """The toolchain is missing, broken or not the declared one."""
    CACHE = 11
    """The shared cache is required and cannot be used; a registry does not answer, or refuses."""
    INTERRUPTED = 130


def printable(text: str) -> str:
    """Return a text with control characters, and whatever else a terminal may act on, escaped as in `\\x1b`; line ends too."""
    return text if text.isprintable() else "".join(char if char.isprintable() else _escaped(char) for char in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines with each line `printable`; tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@dataclass(frozen=True)
class Problem:
    """One mistake of the user: where it stands, what is the case, what to do."""

    file: str
    """Path as the user would type it: relative to the workspace where it lies inside."""
    sentence: str
    hint: str = ""
    line: int = 0
    """Line counted from 1; 0 where no line is to blame."""
    entry: str = ""
    """Name of the entry; empty where the mistake belongs to none."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        facts = f"{self.sentence}; {self.hint}" if self.hint else self.sentence
        # Names and values are the user's, or somebody else's: none may begin a line of its own or move the cursor.
        return printable(f"{place}: {self.entry}: {facts}" if self.entry else f"{place}: {facts}")


class KerneldeclError(Exception):
    """An error whose message is one sentence for the user; no traceback belongs to it."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


class DeclarationError(KerneldeclError):
    """Mistakes in workloads.toml, a rule, an arch or another plug-in: all of them, in order of their place."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[DeclarationError], tuple[tuple[Problem, ...]]]:
        return (type(self), (self.problems,))


class PatternError(KerneldeclError):
    """A pattern matches no entry."""

    exit_code = ExitCode.NO_MATCH


class TuningError(KerneldeclError):
    """An entry has no verified candidate, or failed otherwise."""

    exit_code = ExitCode.FAILED


class StaleError(KerneldeclError):
    """The lock or the artifact is out of date where it had to be fresh."""

    exit_code = ExitCode.STALE


class ArtifactError(KerneldeclError):
    """A file of an artifact is missing, truncated or changed."""

    exit_code = ExitCode.INTEGRITY


class UnmatchedError(KerneldeclError):
    """A function of a model has no kernel in an artifact that must have one for each; the message is the whole report."""

    exit_code = ExitCode.FAILED


class VerificationError(KerneldeclError):
    """A built kernel disagrees with its reference."""

    exit_code = ExitCode.VERIFICATION


class LockHeldError(KerneldeclError):
    """Another process holds the lock, and --no-wait was given."""

    exit_code = ExitCode.LOCK_HELD


class ToolchainError(KerneldeclError):
    """The installed tools are not the declared ones, or do not work."""

    exit_code = ExitCode.ENVIRONMENT


class LostGpuError(ToolchainError):
    """A GPU that was there no longer answers."""


class CacheError(KerneldeclError):
    """The shared cache cannot be used, and the workspace requires it."""

    exit_code = ExitCode.CACHE


class RegistryError(KerneldeclError):
    """A registry does not answer, or refuses."""

    exit_code = ExitCode.CACHE
