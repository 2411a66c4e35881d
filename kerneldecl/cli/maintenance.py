"""Owns the commands about a workspace's files and the machine: init, schema, doctor, cache.

Knows nothing of plans and builds.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from kerneldecl.cli.options import Settings, json_option, print_result
from kerneldecl.errors import ExitCode


@click.command()
@click.pass_obj
def init(settings: Settings) -> None:
    """Write a small workloads.toml to start from."""
    from kerneldecl.cli.init import initialise

    for path in initialise(settings.root):
        print(f"wrote {path.relative_to(settings.root)}")
    print("next: kerneldecl plan, then kerneldecl build")


@click.command()
@click.pass_obj
def schema(settings: Settings) -> None:
    """Print the JSON Schema of workloads.toml, rules' attributes included, for editors."""
    from kerneldecl.declare.json_schema import json_schema

    print(json.dumps(json_schema(settings.root), indent=1))


@click.command()
@click.option("--propose-arch", is_flag=True, help="Print an arch file for this machine's GPU instead: save it as archs/NAME.toml.")
@json_option
@click.pass_obj
def doctor(settings: Settings, as_json: bool, propose_arch: bool) -> int:
    """Check this machine: tool versions, compilers, CPU, GPU, disk; with advice."""
    from kerneldecl.cli.doctor import examine, proposal
    from kerneldecl.toolchain.versions import PINS

    if propose_arch:
        print(proposal(settings.root), end="")
        return ExitCode.DONE
    checks = examine(settings.root, PINS)
    rows = [dataclasses.asdict(c) for c in checks]

    def text(_: Any) -> str:
        lines = [f"{'ok' if c.is_ok else '--' if not c.is_needed else 'NO':<3} {c.name:<18} {c.found}" for c in checks]
        return "\n".join([*lines, *(f"to do: {c.advice}" for c in checks if c.advice)])

    print_result(as_json, {"schema": 1, "checks": rows}, text)
    return ExitCode.DONE if all(c.is_ok or not c.is_needed for c in checks) else ExitCode.ENVIRONMENT


@click.group()
def cache() -> None:
    """Commands about the store."""


@cache.command()
@json_option
@click.pass_obj
def stats(settings: Settings, as_json: bool) -> None:
    """Count the records and blobs of the store, and the damaged ones."""
    from kerneldecl.store.local import LocalStore, store_stats

    found = store_stats(LocalStore(settings.root / "cache"))

    def text(value: Any) -> str:
        rows = [f"{row['kind']:<16} {row['count']:>8} files {row['bytes'] / 1e6:>10.2f} MB" for row in value["kinds"]]
        return "\n".join([*rows, f"{len(value['damaged'])} damaged", *(f"  {line}" for line in value["damaged"])])

    print_result(as_json, found, text)


@cache.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def key(file: Path) -> None:
    """Write a new private key for signing what is shared, and print its public key, for trust.keys."""
    from kerneldecl.store.signing import SIGNING_KEY, new_key

    print(new_key(file))
    print(f"set {SIGNING_KEY}={file.resolve()} where builds may write to the shared cache", file=sys.stderr)
