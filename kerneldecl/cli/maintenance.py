"""Owns the commands about a workspace's files and the machine: init, schema, doctor, cache.

Knows nothing of plans and builds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kerneldecl.cli.model import extracted, how_read
from kerneldecl.cli.options import Settings, json_option, print_result
from kerneldecl.errors import ExitCode

_SIZES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 1024.0, "MIB": 1024.0**2, "GIB": 1024.0**3, "TIB": 1024.0**4}
_AGES = {"S": 1.0, "M": 60.0, "H": 3600.0, "D": 86400.0, "W": 7 * 86400.0}


class Quantity(click.ParamType[float]):
    """A number with a unit, such as 500MB or 30d."""

    name = "quantity"

    def __init__(self, units: Mapping[str, float]) -> None:
        self._units = units

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        digits = text.rstrip("".join(map(chr, range(65, 123))))
        unit = text[len(digits) :].upper()
        try:
            found = float(digits) * self._units[unit]
        except (ValueError, KeyError):
            found = -1.0
        if not 0 <= found < float("inf"):
            self.fail(f"{text!r} is not a number with a unit ({', '.join(self._units)})", param, ctx)
        return found


@click.command()
@click.option(
    "--target", "targets", multiple=True, metavar="ARCH", help="An arch to build for, host or one of `kerneldecl archs`; repeatable."
)
@click.option("--from", "model", metavar="MODEL", help="Declare what this model calls, as `extract` does, instead of an example.")
@how_read
@click.pass_obj
def init(settings: Settings, /, targets: tuple[str, ...], model: str | None, dims: tuple[str, ...], **of: str | None) -> None:
    """Write a workloads.toml to start from, its JSON Schema and .gitignore."""
    from kerneldecl.cli.init import initialise
    from kerneldecl.extract.extract import extracted_text, model_name

    root = settings.root
    if model is None and (dims or any(of.values())):
        raise click.UsageError("--dim, --rows and --dtype say how a model is read; name one by --from")
    written = initialise(root, targets) if model is None else initialise(root, targets, name=model_name(model), entries=False)
    found = None
    try:
        found = extracted(model, root, dims, of) if model is not None else None
    finally:
        if model is not None and found is None:
            for path in written[:2]:
                path.unlink()  # the next try would find a workspace
    for path in written:
        print(f"wrote {path.relative_to(root)}")
    if found:
        print_result(as_json=False, value=found, text=extracted_text)
    print("next: kerneldecl plan, then kerneldecl build")


@click.command()
@click.option(
    "--write", is_flag=True, help="Write it to workloads.schema.json, which a first line `#:schema ./workloads.schema.json` names."
)
@click.pass_obj
def schema(settings: Settings, write: bool) -> None:
    """Print the JSON Schema of workloads.toml, rules' attributes included, for editors."""
    from kerneldecl.cli.init import write_schema
    from kerneldecl.declare.json_schema import json_schema

    if write:
        print(f"wrote {write_schema(settings.root).relative_to(settings.root)}")
    else:
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


@cache.command()
@click.option("--max-size", type=Quantity(_SIZES), default="10GB", help="Bytes that the store may hold, such as 500MB. Default: 10GB.")
@click.option("--max-age", type=Quantity(_AGES), help="Remove what was not used for this long, such as 30d.")
@click.option("--keep-ref", multiple=True, metavar="REV", help="Keep what workloads.lock of this git revision refers to. Repeatable.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@json_option
@click.pass_obj
def gc(settings: Settings, /, max_size: float, max_age: float | None, keep_ref: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Remove records and kernels that were not used for long, or are too many; all can be made again.

    What locks here, the last build, git's index or a --keep-ref refer to stays. Exit code 9 while a build is at work.
    """
    from kerneldecl.planning.referred import referred
    from kerneldecl.store.collect import Limits, collect
    from kerneldecl.store.local import LocalStore
    from kerneldecl.store.lock import unused

    store = LocalStore(settings.root / "cache")
    oldest = None if max_age is None else time.time() - max_age
    with unused(store.root) if store.root.is_dir() else contextlib.nullcontext():
        done = collect(store, Limits(int(max_size), oldest), referred(settings.root, keep_ref), is_dry=dry_run)
    names = [str(path.relative_to(store.root)) for path in done.removed]
    found = {"schema": 1, "dry_run": dry_run, **dataclasses.asdict(done), "removed": names}

    def text(_: Any) -> str:
        verb = "would remove" if dry_run else "removed"
        kept = f"{done.left_bytes / 1e6:.2f} MB stay, {done.kept_bytes / 1e6:.2f} MB of them in use"
        listed = [f"  {name}" for name in names] if dry_run else []
        return "\n".join([f"{verb} {len(names)} files, {done.removed_bytes / 1e6:.2f} MB; {kept}", *listed])

    print_result(as_json, found, text)
