"""Owns shell completion: the command that prints it, and the words that complete a pattern.

Knows nothing of plans: words are read from workloads.toml as it stands, which takes milliseconds and works where it has mistakes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from kerneldecl.declare.select import STATES
from kerneldecl.declare.toml_keys import FILE

_PROGRAM, _VARIABLE = "kerneldecl", "_KERNELDECL_COMPLETE"
_HINTS = {
    "bash": '~/.bashrc: eval "$(kerneldecl completion bash)"',
    "zsh": '~/.zshrc: eval "$(kerneldecl completion zsh)"',
    "fish": "~/.config/fish/completions/kerneldecl.fish: kerneldecl completion fish | source",
}


@click.command()
@click.argument("shell", type=click.Choice(list(_HINTS)))
def completion(shell: str) -> None:
    """Print what a shell needs to complete commands, options, entries, targets, rules and tags.

    Put it where the shell starts: `eval "$(kerneldecl completion bash)"` in ~/.bashrc.
    """
    found = get_completion_class(shell)
    assert found is not None, "click has these three"
    from kerneldecl.cli.commands import main

    print(f"# {_HINTS[shell]}")
    print(found(main, {}, _PROGRAM, _VARIABLE).source())


def complete_pattern(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the words that a pattern may be which begins so."""
    folder = context.find_root().params.get("folder") or Path()
    return [word for word in words(Path(folder)) if word.startswith(incomplete)]


def words(folder: Path) -> list[str]:
    """Return entries' names, alone and with their targets, and the rules and tags that entries have."""
    import tomli

    with contextlib.suppress(OSError, ValueError):
        document = tomli.loads((folder / FILE).read_text(encoding="utf-8"))
        return list(dict.fromkeys(_words(document)))
    return []


def _words(document: dict[str, Any]) -> Iterator[str]:
    tables = [table for table in _listed(document.get("workload")) if isinstance(table, dict) and isinstance(table.get("name"), str)]
    targets = found if isinstance(found := document.get("target", {}), dict) else {}
    yield from (table["name"] for table in tables)
    yield from (f"*@{target}" for target in targets)
    yield from (f"{table['name']}@{target}" for table in tables for target in _listed(table.get("targets")) or list(targets))
    yield from (f"rule:{table['rule']}" for table in tables if isinstance(table.get("rule"), str))
    yield from (f"arch:{target['arch']}" for target in targets.values() if isinstance(target, dict) and isinstance(target.get("arch"), str))
    yield from (f"{state}:" for state in STATES)
    yield from (f"tag:{tag}" for table in tables for tag in _listed(table.get("tags")) if isinstance(tag, str))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
