"""Owns the command line: options before the command, errors, and exit codes.

Knows nothing of how anything is done. Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import io
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import click

from kerneldecl.cli.in_the_way import OF_WHAT_IS_THERE, in_the_way
from kerneldecl.cli.options import Settings
from kerneldecl.cli.streams import make_usable
from kerneldecl.errors import ExitCode, KerneldeclError, ToolchainError, printable_lines
from kerneldecl.store.scratch import temporary_folder

_OF_THE_MACHINE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, *OF_WHAT_IS_THERE})
"""Errors of files that say what the user has to mend: a folder that may not be written to, a path that is too long."""
_OF_NO_FILE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE})
"""Those that need no name: a write to an open file fails without one, and so does what would open one too many."""
_ALLOCATIONS_BETWEEN_COLLECTIONS = 1_000_000
"""A plan of ten thousand entries makes as many objects, and all stay: looking through them for garbage took a fifth of its time."""


def run() -> int:
    """Run the command line and return its exit code."""
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, functools.partial(_interrupt, interrupts))
    gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS)
    # Looking for plug-ins of pydantic takes as long as importing it, and there are none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        return _ran(sys.argv[1:])
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _interrupted()
    except BrokenPipeError:
        _drop_output()  # the reader has closed the pipe (`kerneldecl plan | head`)
        return ExitCode.DONE
    except Exception as error:  # noqa: BLE001  what is no mistake of the user's is a bug, reported in one line with the traceback in a file
        # An interrupted import, or a descriptor that is being named, makes another error of it.
        return _interrupted() if interrupts else _reported(error)


def _ran(arguments: list[str]) -> int:
    """Run a command and have all that it says written, while what goes wrong with that can still be told."""
    make_usable()
    code = int(main.main(_shared_first(arguments), prog_name="kerneldecl", standalone_mode=False) or ExitCode.DONE)
    sys.stdout.flush()
    return code


def _interrupt(interrupts: list[int], number: int, _frame: object) -> None:
    interrupts.append(number)
    raise KeyboardInterrupt


def _reported(error: Exception) -> ExitCode:
    """Print what ended the command, a line for each mistake, and return the exit code."""
    if isinstance(error, click.ClickException):
        _say(_usage(error))
        return ExitCode.USAGE
    if isinstance(error, KerneldeclError):
        for line in str(error).split("\n"):
            _say(f"error: {line}")
        return error.exit_code
    if isinstance(error, OSError) and (reason := in_the_way(error)):
        _say(f"error: {reason}")
        _drop_output()
        return ExitCode.ENVIRONMENT
    if isinstance(error, OSError) and (error.errno in _OF_NO_FILE or (error.errno in _OF_THE_MACHINE and error.filename is not None)):
        what = "a file, or standard output," if error.filename is None else os.fsdecode(error.filename)
        _say(f"error: {what} cannot be read or written: {error.strerror}")
        _drop_output()
        return ExitCode.ENVIRONMENT
    return _internal_error()


def _drop_output() -> None:
    """Have what nobody could be given yet lead nowhere: it would be tried again, and fail again, when the process ends."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: click.ClickException) -> str:
    """Return a mistake of the command line as one sentence: the command, what is wrong with it, and what tells more."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.exceptions.NoArgsIsHelpError) or context is None:
        text = io.StringIO()
        error.show(text)
        return text.getvalue().rstrip("\n")
    sentence, command = error.format_message().rstrip("."), context.command_path
    is_own = type(error) is click.UsageError and not sentence.startswith(("No such", "Got unexpected"))
    way_out = "" if is_own else f"`{command} --help` lists what it takes"
    if isinstance(error, click.NoSuchOption) and not error.option_name.startswith("--"):
        way_out = f"a pattern that takes entries out follows `--`: {command} '*' -- '-gemm*'"
    return f"error: {command}: {sentence}{' ' if sentence.endswith('?') else '; '}{way_out}" if way_out else f"error: {command}: {sentence}"


def _internal_error() -> ExitCode:
    text = traceback.format_exc()
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=temporary_folder(), suffix=".log", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as log:
            log.write(text)
        place = f"the traceback is in {log.name}"
    except (OSError, KerneldeclError) as error:
        _say(text)
        place = f"the traceback is above, as no file could be written: {error}"
    _say(f"error: internal error: {text.strip().splitlines()[-1]}; {place}")
    return ExitCode.INTERNAL


def _shared_first(arguments: list[str]) -> list[str]:
    """Return the arguments with the options that every command shares in front, wherever the user put them."""
    shared: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument in {"-C", "--color"}:
            shared += [argument, *(value for value in [next(remaining, None)] if value is not None)]
        elif argument in {"-q", "--quiet", "-v", "-vv", "--verbose"} or argument.startswith("--color="):
            shared.append(argument)
        elif argument == "--":
            rest += [argument, *remaining]
        else:
            rest.append(argument)
    return shared + rest


def _interrupted() -> ExitCode:
    _say("interrupted: finished work is kept; the next build continues from there")
    return ExitCode.INTERRUPTED


def _say(text: str) -> None:
    print(printable_lines(text), file=sys.stderr)


_MODULES = {
    "build": ("build", "measure"),
    "catalogue": ("archs", "policies", "rules", "templates"),
    "compare": ("compare",),
    "completion": ("completion",),
    "deploy": ("bench", "compile", "run"),
    "export": ("export",),
    "gate": ("diff", "gate"),
    "html_report": ("report",),
    "inspect": ("check", "plan", "query", "show", "why"),
    "log": ("log",),
    "man": ("man",),
    "maintenance": ("cache", "doctor", "init", "schema"),
    "model": ("extract", "verify"),
    "new": ("new",),
    "package": ("pull", "push"),
    "top": ("top",),
    "watch": ("watch",),
}
"""The commands that each module of `kerneldecl.cli` has: the one that is given is imported, and no other."""
_WHERE = {command: module for module, commands in _MODULES.items() for command in commands}


class Commands(click.Group):
    """The commands by name, each imported when it is asked for."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's signature
        if cmd_name not in _WHERE:
            return None
        module = importlib.import_module(f"kerneldecl.cli.{_WHERE[cmd_name]}")
        found = next(each for each in vars(module).values() if isinstance(each, click.Command) and each.name == cmd_name)
        assert isinstance(found, click.Command)
        return found


@click.group(
    cls=Commands,
    commands={name: click.Command(name) for name in sorted(_WHERE)},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("-C", "folder", type=click.Path(path_type=Path), default=Path(), help="Work in this folder.")
@click.option("-q", "--quiet", is_flag=True, help="Print failures only.")
@click.option("-v", "--verbose", "verbosity", count=True, help="Print every step.")
@click.option("--color", "colour", type=click.Choice(["auto", "always", "never"]), default="auto", help="When to use colour.")
@click.version_option(package_name="kerneldecl")
@click.pass_context
def main(context: click.Context, folder: Path, quiet: bool, verbosity: int, colour: str) -> None:
    """Build tuned kernels from the declarations in workloads.toml.

    PATTERNS select entries: `qkv*`, `*@host`, `rule:matmul`, `tag:fast`; none selects all.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ToolchainError("the current folder is gone; change to another one") from None
    context.obj = Settings(folder.resolve(), quiet, verbosity, colour)
