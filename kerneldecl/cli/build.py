"""Owns the commands that build and measure, and whether a build has anything to do.

Knows nothing of how entries are built.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from kerneldecl.cli.options import Settings, chosen_entries, complete, json_option, overrides_option, patterns_argument, print_result
from kerneldecl.cli.package import key_option, trusted_keys
from kerneldecl.diagnostics.units import counted
from kerneldecl.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kerneldecl.cli.winners import Before
    from kerneldecl.planning.workspace import Workspace
    from kerneldecl.stages.session import Options, Session
    from kerneldecl.store.results import TuneResult

_BUILD_FLAGS = (
    *("policy", "overrides", "retune", "reverify", "locked", "no_measure", "require_measured"),
    *("cache", "events", "scheduler", "rpc", "as_json"),
)
"""Options with which a build is never cut short by the quick plan."""


@click.command()
@patterns_argument
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Processes that compile at once. Default: the cores.")
@click.option("--keep-going/--fail-fast", default=True, help="Go on after a failed entry, or stop.")
@click.option("--policy", metavar="POLICY", help="Try this policy, or several: -D policy=POLICY.")
@overrides_option
@click.option("--require-all", is_flag=True, help="Link no artifact that would lack a failed entry.")
@click.option(
    "--retune",
    multiple=True,
    metavar="PATTERN",
    shell_complete=complete,
    help="Tune these entries again, whatever is known of them. Repeatable.",
)
@click.option("--reverify", is_flag=True, help="Time the best three again where this GPU's driver or clocks are not those of the record.")
@click.option("--locked", is_flag=True, help="Exit with 3 if workloads.lock would change.")
@click.option("--no-measure", is_flag=True, help="Write what a GPU must measure into a bundle, for `kerneldecl measure`.")
@click.option("--require-measured", is_flag=True, help="Fail what cannot be measured here, instead of linking what is expected best.")
@click.option(
    "--cache",
    type=click.Choice(["off", "read", "read-write", "required"]),
    help="What to do with the shared cache, instead of the declared mode.",
)
@click.option(
    "--events",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write every event to FILE as it comes, as JSON lines.",
)
@click.option("--scheduler", metavar="ADDRESS", help="Compile and measure on the workers of this Dask scheduler: tcp://HOST:8786.")
@click.option("--rpc", metavar="HOST:PORT/KEY", help="Measure for declared archs on boards behind a tracker of TVM's RPC.")
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=60.0,
    metavar="SECS",
    help="Wait so long for a worker that has the device. Default: 60.",
)
@click.option("--overwrite", is_flag=True, help="Link other content under a version that was published.")
@click.option("--no-wait", is_flag=True, help="Exit with 9 if another build is at work here.")
@click.option("--best-so-far", is_flag=True, help="On Ctrl-C, link the best that was found until then; a second one ends at once.")
@json_option
@click.pass_obj
def build(settings: Settings, /, patterns: tuple[str, ...], **options: Any) -> int:
    """Build what is out of date, and link the artifacts."""
    if not (patterns or any(options[name] for name in _BUILD_FLAGS)) and (count := _nothing_to_do(settings.root)):
        if not settings.quiet:
            print(f"{counted(count, 'entry', 'entries')}: {count} up to date")
        return ExitCode.DONE
    from kerneldecl.api import frozen_workspace, run_build
    from kerneldecl.cli import summary
    from kerneldecl.cli.event_log import logged
    from kerneldecl.cli.pace import Clock, write_paces
    from kerneldecl.cli.progress import display
    from kerneldecl.cli.table import window
    from kerneldecl.stages.session import make_plan
    from kerneldecl.stages.suspect import suspects

    asked, began = _asked(options), time.monotonic()
    with frozen_workspace(settings.root, _overrides(options["policy"], options["overrides"])) as opened:
        workspace = _with_cache(opened, options["cache"]) if options["cache"] else opened
        if options["retune"]:
            asked = replace(asked, retuned=frozenset(chosen_entries(workspace, options["retune"])))
        if options["reverify"]:
            asked = replace(asked, reverified=suspects(make_plan(workspace).entries) - asked.retuned)
        before = _built_before(workspace, asked.retuned | asked.reverified)
        with (
            display(quiet=settings.quiet, verbosity=settings.verbosity, colour=settings.colour) as shown,
            logged(shown, workspace.cache, options["events"]) as report,
            _interrupts(is_best_wanted=options["best_so_far"]) as is_interrupted,
        ):
            clock = Clock(report)
            done = run_build(workspace, patterns, replace(asked, is_interrupted=is_interrupted), clock)
        write_paces(workspace.cache, clock.paces)
        _leave_listing(workspace, done)
        found = summary.build_json(done, time.monotonic() - began, before)
    _export_spans(workspace.cache)
    if options["as_json"] or not settings.quiet:
        print_result(options["as_json"], found, lambda told: summary.build_text(told, window()))
    if done.is_interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if done.failures else ExitCode.DONE


def _overrides(policy: str | None, texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings that stand in for the declared ones; raise UsageError where `policy` is given in both ways."""
    from kerneldecl.declare.overrides import overrides_of, value_of

    found = overrides_of(texts)
    if policy and "policy" in found:
        raise click.UsageError("--policy and -D policy=… say the same: give one of them")
    return {**found, "policy": value_of("--policy", policy)} if policy else found


def _asked(options: Mapping[str, Any]) -> Options:
    """Return how the user wants the build; raise UsageError where options exclude each other."""
    from kerneldecl.stages.session import Options

    again = "--retune" if options["retune"] else "--reverify" if options["reverify"] else ""
    if again and (options["locked"] or options["no_measure"]):
        other = "--locked, which forbids that workloads.lock changes" if options["locked"] else "--no-measure"
        raise click.UsageError(f"{again} measures again, which goes with neither --locked nor --no-measure: leave out {other}")
    if options["no_measure"] and options["require_measured"]:
        raise click.UsageError("--no-measure leaves entries unmeasured, which --require-measured forbids: give one of them")
    if options["scheduler"] and options["rpc"]:
        raise click.UsageError("--scheduler and --rpc both say where to measure: give one of them")
    return Options(
        keep_going=options["keep_going"],
        jobs=options["jobs"],
        locked=options["locked"],
        wait=not options["no_wait"],
        measure=not options["no_measure"],
        require_measured=options["require_measured"],
        require_all=options["require_all"],
        scheduler=options["scheduler"] or "",
        rpc=options["rpc"] or "",
        patience_secs=options["patience"],
        overwrite=options["overwrite"],
    )


def _leave_listing(workspace: Workspace, done: Session) -> None:
    """Keep the list of entries of a complete build for `show` and `query`."""
    from kerneldecl.cli.listing import Row, write_listing
    from kerneldecl.cli.report import query_json

    if done.failures or done.plan.misses or workspace.is_overridden:
        return
    told = query_json(done.plan.entries)["entries"]
    of = [each.workload for each in done.plan.entries]
    rows = [Row(w.name, w.target, w.rule, w.tags, w.policy, each) for w, each in zip(of, told, strict=True)]
    write_listing(workspace.root, rows, dict(workspace.declaration.targets))


def _built_before(workspace: Workspace, again: frozenset[str]) -> Before:
    """Return what gives the record by which the last build has linked an entry. Those of entries to tune `again` are read now: they go."""
    from kerneldecl.planning.last_build import FILE, read_state
    from kerneldecl.store.local import Record
    from kerneldecl.store.results import TuneResult

    keys = read_state(workspace.cache / FILE).keys

    def read(entry: str, is_local: bool) -> TuneResult | None:
        found = workspace.store.read("tune", keys.get(entry, {}).get("tune", ""), is_local=is_local)
        return TuneResult(found.key, found.result) if isinstance(found, Record) else None

    kept = {name: read(name, is_local=True) or read(name, is_local=False) for name in again}
    return lambda entry: kept[entry.entry] if entry.entry in kept else read(entry.entry, entry.arch.is_detected)


@contextlib.contextmanager
def _interrupts(*, is_best_wanted: bool) -> Iterator[Callable[[], bool] | None]:
    """Provide what says whether the user has interrupted the build and wants what is there; None where an interrupt ends it at once."""
    if not is_best_wanted:
        yield None
        return
    interrupted, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set() and callable(before):
            before(number, frame)
        interrupted.set()
        # Not through a stream, which may be half through a line of its own.
        os.write(2, b"interrupted: the batch under way is finished and the best so far is linked; a second interrupt ends at once\n")

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--part", metavar="I/N", default="1/1", help="Measure one of N parts, for N machines; counted from 1.")
@key_option
@click.option("--keep-going/--fail-fast", default=True, help="Go on after a failed entry.")
@click.option("--trust-rules", is_flag=True, help="Run the bundle's own rules, which is Python code, for references.")
@json_option
@click.pass_obj
def measure(settings: Settings, /, bundle: Path, part: str, as_json: bool, **given: Any) -> int:
    """Verify and time a bundle's candidates on this machine's GPU. Needs no compiler.

    BUNDLE is the folder, or a tar of it (`kerneldecl export BUNDLE --format tar`). What was measured here before is not measured again.
    The records go into cache/record of this folder: commit them, and every build links what was measured.
    """
    from kerneldecl.api import measure_bundle
    from kerneldecl.cli.progress import display
    from kerneldecl.cli.summary import measured_text
    from kerneldecl.tuning.bundle import Trust

    with display(quiet=settings.quiet, verbosity=settings.verbosity, colour=settings.colour) as report:
        trust = Trust(given["trust_rules"], trusted_keys(settings, given["keys"]))
        found = measure_bundle(bundle, settings.root / "cache", report, keep_going=given["keep_going"], trust=trust, part=_part(part))
    if as_json or not settings.quiet:
        print_result(as_json, found, measured_text)
    return ExitCode.FAILED if found["failed"] else ExitCode.DONE


def _part(text: str) -> tuple[int, int]:
    numbers = text.split("/")
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
        raise click.UsageError(f"--part {text!r} is no I/N such as 2/3, counted from 1")
    return int(numbers[0]), int(numbers[1])


def _with_cache(workspace: Workspace, mode: str) -> Workspace:
    """Return the workspace with another mode of its shared cache."""
    cache = workspace.declaration.cache
    if cache is None:
        raise click.UsageError("--cache needs a shared cache: declare its url under [cache] in workloads.toml")
    return replace(workspace, declaration=replace(workspace.declaration, cache=replace(cache, mode=mode) if mode != "off" else None))


def _export_spans(cache: Path) -> None:
    """Send the build's spans where OpenTelemetry's variables say; nowhere where they say nothing."""
    from kerneldecl.cli import otel

    if otel.is_wanted():
        from kerneldecl.cli.event_log import FILE, read_log
        from kerneldecl.report.spans import spans

        if problem := otel.export(spans(read_log(cache / FILE))):
            click.echo(f"note: {problem}", err=True)


def _nothing_to_do(root: Path) -> int:
    """Return the number of entries if the quick plan finds them all up to date, else 0; leave a stamp for the next time."""
    from kerneldecl.null_build.quick_plan import quick_plan
    from kerneldecl.null_build.stamp import restamp

    actions = quick_plan(root)
    if actions is None or not all(action.is_hit for action in actions):
        return 0
    return restamp(str(root), len({action.entry for action in actions if action.kind != "link"}))
