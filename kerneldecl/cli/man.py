"""Owns the manual page: the text of every command's --help as roff, for `man`.

Knows nothing of what the commands do: it is made from what they say of themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from kerneldecl.errors import ExitCode


@click.command()
@click.pass_context
def man(context: click.Context) -> None:
    """Print the manual page of all commands: `kerneldecl man | man -l -` shows it."""
    root = context.find_root()
    assert isinstance(root.command, click.Group)
    print("\n".join(page(root.command, root)))


def page(group: click.Group, context: click.Context) -> Iterator[str]:
    """Yield the lines of the page of a group of commands, which is called in a context."""
    yield f'.TH {_text(str(context.info_name)).upper()} 1 "" "" "User Commands"'
    yield from (".SH NAME", f"{_text(str(context.info_name))} \\- {_text(_first(group.help)).rstrip('.')}")
    yield from (".SH SYNOPSIS", f"{_bold(str(context.info_name))} {_text(' '.join(group.collect_usage_pieces(context)))}")
    yield ".SH DESCRIPTION"
    yield from _paragraphs(group.help)
    yield ".SH OPTIONS"
    yield from _options(group, context)
    yield ".SH COMMANDS"
    yield from _commands(group, context)
    yield ".SH EXIT STATUS"
    for code in ExitCode:
        yield from (".TP", str(int(code)), _text(code.name.lower().replace("_", " ")))


def _commands(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        of_command = click.Context(command, info_name=name, parent=context)
        yield f".SS {_text(' '.join([of_command.command_path, *command.collect_usage_pieces(of_command)]))}"
        yield from _paragraphs(command.help)
        yield from _options(command, of_command)
        if isinstance(command, click.Group):
            yield from _commands(command, of_command)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context)):
            yield from (".TP", _bold(record[0]), _text(" ".join(record[1].split())))


def _paragraphs(text: str | None) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        yield from (".PP", _text(" ".join(paragraph.split())))


def _first(text: str | None) -> str:
    return inspect.cleandoc(text or "").partition("\n\n")[0]


def _bold(text: str) -> str:
    return f"\\fB{_text(text)}\\fR"


def _text(text: str) -> str:
    """Return a text as roff has it: backslashes, hyphens that are typed, and marks at a line's start are escaped."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
