"""Owns shell completion: the command that prints it, and the words that complete a pattern.

Knows nothing of plans: words are read from workloads.toml as it stands, which takes milliseconds and works where it has mistakes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from kerneldecl.declare.select import STATES
from kerneldecl.declare.toml_keys import FILE, SETTINGS
from kerneldecl.plugins.find import Kind, plugin_names
from kerneldecl.store.regular import read_file

_PROGRAM, _VARIABLE = "kerneldecl", "_KERNELDECL_COMPLETE"
_HINTS = {
    "bash": '~/.bashrc: eval "$(kerneldecl completion bash)"',
    "zsh": '~/.zshrc: eval "$(kerneldecl completion zsh)"',
    "fish": "~/.config/fish/completions/kerneldecl.fish: kerneldecl completion fish | source",
}
_BASH = """\
_kerneldecl_completion() {
    # Readline ends words at : @ and =, which stand inside of patterns: words are what blanks separate, and what it has cut off stays.
    local line="${COMP_LINE:0:COMP_POINT}" words current cut prefix type value
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    current="${words[${#words[@]}-1]}" cut="${COMP_WORDS[COMP_CWORD]}"
    [[ "$cut" == [:@=] ]] && cut=""
    prefix="${current%"$cut"}"
    while IFS=',' read -r type value; do
        case "$type" in
            dir) COMPREPLY=(); compopt -o dirnames ;;
            file) COMPREPLY=(); compopt -o default ;;
            plain) COMPREPLY+=("${value#"$prefix"}") ;;
        esac
    done < <(COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) _KERNELDECL_COMPLETE=bash_complete "$1")
    [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *[:=] ]] && compopt -o nospace
    return 0
}
complete -o nosort -F _kerneldecl_completion kerneldecl"""
"""For bash in place of click's, which takes readline's words as they are: `rule:ma` is three of them."""


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
    print(_BASH if shell == "bash" else found(main, {}, _PROGRAM, _VARIABLE).source())


def complete_pattern(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the words that a pattern may be which begins so."""
    folder = context.find_root().params.get("folder") or Path()
    return [word for word in words(Path(folder)) if word.startswith(incomplete)]


def complete_plugin(kind: Kind) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return what completes the name of a plug-in of a kind."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        folder = context.find_root().params.get("folder") or Path()
        return [name for name in plugin_names(kind, Path(folder)) if name.startswith(incomplete)]

    return complete


def complete_override(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the settings that `-D` may override, or the policies behind `policy=`."""
    key, equals, value = incomplete.partition("=")
    if key == "policy" and equals:
        return [f"policy={name}" for name in complete_plugin("policies")(context, parameter, value)]
    return [f"{name}=" for name in SETTINGS if name != "targets" and name.startswith(incomplete)]


def words(folder: Path) -> list[str]:
    """Return entries' names, alone and with their targets, and the rules and tags that entries have."""
    import tomli

    with contextlib.suppress(OSError, ValueError):
        document = tomli.loads(read_file(folder / FILE).decode())
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
