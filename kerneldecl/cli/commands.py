"""Owns the command line: options, what is printed where, and exit codes.

Knows nothing of how anything is done. Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kerneldecl.errors import ExitCode, KerneldeclError, StaleError

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
patterns_argument = click.argument("patterns", nargs=-1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options that stand before the command."""

    root: Path
    quiet: bool
    verbosity: int
    colour: str


def run() -> int:
    """Run the command line and return its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Looking for plug-ins of pydantic takes as long as importing it, and we have none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        return int(main.main(_shared_first(sys.argv[1:]), standalone_mode=False) or ExitCode.DONE)
    except click.exceptions.Abort:
        return _interrupted()
    except KeyboardInterrupt:
        return _interrupted()
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except KerneldeclError as error:
        for line in str(error).splitlines():
            _say(f"error: {line}")
        return error.exit_code
    except BrokenPipeError:
        # The reader has had enough (`kerneldecl plan | head`); nothing more can be flushed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except Exception:  # noqa: BLE001  the last resort: a bug of ours, told in one line with the traceback in a file
        with tempfile.NamedTemporaryFile("w", prefix="kerneldecl-", suffix=".log", delete=False, encoding="utf-8") as log:
            log.write(traceback.format_exc())
        _say(f"error: internal error: {traceback.format_exc().strip().splitlines()[-1]}; the traceback is in {log.name}")
        return ExitCode.INTERNAL


def _shared_first(arguments: list[str]) -> list[str]:
    """Return the arguments with those options in front that every command shares, wherever the user put them."""
    shared: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in {"-C", "--color"}:
            shared += [word, *(value for value in [next(words, None)] if value is not None)]
        elif word in {"-q", "--quiet", "-v", "-vv", "--verbose"} or word.startswith("--color="):
            shared.append(word)
        elif word == "--":
            rest += [word, *words]
        else:
            rest.append(word)
    return shared + rest


def _interrupted() -> ExitCode:
    _say("interrupted: what was finished is kept; the next build goes on from there")
    return ExitCode.INTERRUPTED


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _print(as_json: bool, value: Any, text: Callable[[Any], str]) -> None:
    print(json.dumps(value, indent=1) if as_json else text(value))


def _print_plan(as_json: bool, actions: Any) -> None:
    from kerneldecl.cli import report

    print(json.dumps(report.plan_json(actions), indent=1) if as_json else report.plan_text(actions))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
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
    context.obj = Settings(folder.resolve(), quiet, verbosity, colour)


def _workspace(settings: Settings) -> Any:
    from kerneldecl.planning.workspace import open_workspace

    return open_workspace(settings.root)


def _chosen(workspace: Any, patterns: tuple[str, ...]) -> list[str]:
    from kerneldecl.declare.select import select

    return [workload.entry for workload in select(workspace.declaration.workloads, patterns)]


@main.command()
@click.pass_obj
def init(settings: Settings) -> None:
    """Write a small workloads.toml to start from."""
    from kerneldecl.cli.init import initialise

    for path in initialise(settings.root):
        print(f"wrote {path.relative_to(settings.root)}")
    print("next: kerneldecl plan, then kerneldecl build")


@main.command()
@click.argument("model")
@click.option("-o", "output", type=click.Path(path_type=Path), help="The workspace's workloads.toml, new or not.")
@click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE,…", help="Sizes of a dynamic dimension that get entries; repeatable.")
@json_option
@click.pass_obj
def extract(settings: Settings, model: str, output: Path | None, dims: tuple[str, ...], as_json: bool) -> None:
    """Declare what a MODEL calls: Relax IR (.json), ONNX (.onnx), torch.export (.pt2) or a Python module:attribute.

    Run again, it adds what is new, marks what is gone and leaves every other line as it is.
    """
    from kerneldecl.declare.toml_keys import FILE
    from kerneldecl.extract.extract import extract_model, extracted_text, sizes_of

    if output is not None and output.name != FILE:
        raise click.UsageError(f"-o is {output}; the file that declares entries is always named {FILE}: expected a path that ends in it")
    root = settings.root if output is None else output.resolve().parent
    _print(as_json, extract_model(model, root, sizes_of(dims)), extracted_text)


@main.command()
@patterns_argument
@click.option("--stale", is_flag=True, help="Exit with 3 if anything is out of date.")
@json_option
@click.pass_obj
def check(settings: Settings, patterns: tuple[str, ...], stale: bool, as_json: bool) -> None:
    """Check the declarations, and with --stale whether everything is up to date. Builds nothing."""
    from kerneldecl import flow

    workspace = _workspace(settings)
    chosen = _chosen(workspace, patterns)
    if not stale:
        _print(as_json, {"schema": 1, "entries": len(chosen)}, lambda found: f"{found['entries']} entries declared, no mistakes")
        return
    plan = flow.make_plan(workspace)
    actions = [a for a in plan.actions if not patterns or a.entry in set(chosen)]
    _print_plan(as_json, actions)
    out_of_date = sorted({action.entry for action in actions if not action.is_hit})
    if out_of_date:
        raise StaleError(f"{len(out_of_date)} out of date: {', '.join(out_of_date[:5])}{' …' if len(out_of_date) > 5 else ''}")
    if flow.lock_of(workspace, plan) != flow.lock_on_disk(workspace):
        raise StaleError("workloads.lock is out of date; run `kerneldecl build` and commit it")


@main.command()
@patterns_argument
@json_option
@click.pass_obj
def plan(settings: Settings, patterns: tuple[str, ...], as_json: bool) -> None:
    """Say what a build would do, and why. Runs nothing."""
    from kerneldecl.null_build.quick_plan import quick_plan

    actions = None if patterns else quick_plan(settings.root)
    if actions is None:
        from kerneldecl import flow

        workspace = _workspace(settings)
        chosen = set(_chosen(workspace, patterns))
        actions = [a for a in flow.make_plan(workspace).actions if not patterns or a.entry in chosen]
    _print_plan(as_json, actions)


@main.command()
@patterns_argument
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Processes that compile at once. Default: the cores.")
@click.option("--keep-going/--fail-fast", default=None, help="Go on after a failed entry. Default: in CI, and where CI is set.")
@click.option("--locked", is_flag=True, help="Exit with 3 if workloads.lock would change.")
@click.option("--no-measure", is_flag=True, help="Write what a GPU must measure into a bundle, for `kerneldecl measure`.")
@click.option("--require-measured", is_flag=True, help="Fail what cannot be measured here, instead of linking what is expected best.")
@click.option("--no-wait", is_flag=True, help="Exit with 9 if another build is at work here.")
@json_option
@click.pass_obj
def build(settings: Settings, /, patterns: tuple[str, ...], **options: Any) -> int:
    """Build what is out of date, and link the artifacts."""
    if not (patterns or any(options[name] for name in _BUILD_FLAGS)) and (count := _nothing_to_do(settings.root)):
        if not settings.quiet:
            print(f"{count} entries: {count} up to date")
        return ExitCode.DONE
    from kerneldecl import flow
    from kerneldecl.api import run_build
    from kerneldecl.cli import summary
    from kerneldecl.cli.progress import display

    keep_going = options["keep_going"] if options["keep_going"] is not None else bool(os.environ.get("CI"))
    if options["no_measure"] and options["require_measured"]:
        raise click.UsageError("--no-measure leaves entries unmeasured, which --require-measured forbids: give one of them")
    asked = flow.Options(
        keep_going=keep_going,
        locked=options["locked"],
        wait=not options["no_wait"],
        measure=not options["no_measure"],
        require_measured=options["require_measured"],
    )
    workspace = _workspace(settings)
    with display(quiet=settings.quiet, verbosity=settings.verbosity, colour=settings.colour) as report:
        done = run_build(workspace, patterns, asked, options["jobs"], report)
    found = summary.build_json(done)
    if options["as_json"] or not settings.quiet:
        _print(options["as_json"], found, summary.build_text)
    return ExitCode.FAILED if done.failures else ExitCode.DONE


_BUILD_FLAGS = ("locked", "no_measure", "require_measured", "as_json")
"""Options with which a build is never cut short by the quick plan."""


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.option("--keep-going/--fail-fast", default=True, help="Go on after a failed entry.")
@json_option
@click.pass_obj
def measure(settings: Settings, /, bundle: Path, keep_going: bool, as_json: bool) -> int:
    """Verify and time a bundle's candidates on this machine's GPU. Needs no compiler.

    The records go into cache/record of this folder: commit them, and every build links what was measured.
    """
    from kerneldecl.api import measure_bundle
    from kerneldecl.cli.progress import display
    from kerneldecl.cli.summary import measured_text

    with display(quiet=settings.quiet, verbosity=settings.verbosity, colour=settings.colour) as report:
        found = measure_bundle(bundle, settings.root / "cache", report, keep_going=keep_going)
    if as_json or not settings.quiet:
        _print(as_json, found, measured_text)
    return ExitCode.FAILED if found["failed"] else ExitCode.DONE


def _nothing_to_do(root: Path) -> int:
    """Return the number of entries if the quick plan finds them all up to date, else 0; leave a stamp for the next time."""
    from kerneldecl.null_build.quick_plan import quick_plan
    from kerneldecl.null_build.stamp import restamp

    actions = quick_plan(root)
    if actions is None or not all(action.is_hit for action in actions):
        return 0
    return restamp(str(root), len({action.entry for action in actions if action.kind != "link"}))


@main.command()
@click.argument("entry")
@json_option
@click.pass_obj
def why(settings: Settings, entry: str, as_json: bool) -> None:
    """Say what changed: lines of the manifests, old and new."""
    from kerneldecl import flow
    from kerneldecl.cli import report
    from kerneldecl.planning.last_build import read_state
    from kerneldecl.plugins.find import shadowed_file

    workspace = _workspace(settings)
    made, last = flow.make_plan(workspace), read_state(workspace.store.root / "state.json")
    found = []
    for name in _chosen(workspace, (entry,)):
        planned = next(e for e in made.entries if e.entry == name)
        link = next(link for link in made.links if link.target == planned.workload.target)
        standard = shadowed_file("rules", workspace.root, planned.workload.rule)
        found.append(report.why_json(planned, link, last, str(standard or "")))
    _print(as_json, found if len(found) > 1 else found[0], lambda _: "\n".join(map(report.why_text, found)))


@main.command()
@click.argument("entry", required=False)
@json_option
@click.pass_obj
def show(settings: Settings, entry: str | None, as_json: bool) -> None:
    """Show an entry's candidates with their times, or all entries with their winners."""
    from kerneldecl import flow
    from kerneldecl.cli import report

    workspace = _workspace(settings)
    made = flow.make_plan(workspace)
    chosen = _chosen(workspace, (entry,) if entry else ())
    entries = [e for e in made.entries if e.entry in set(chosen)]
    if entry is None:
        _print(as_json, report.query_json(entries), report.query_text)
        return
    found = [report.show_json(e) for e in entries]
    _print(as_json, found if len(found) > 1 else found[0], lambda _: "\n\n".join(map(report.show_text, found)))


@main.command()
@click.argument("pattern")
@json_option
@click.pass_obj
def query(settings: Settings, pattern: str, as_json: bool) -> None:
    """List the entries that a pattern selects, with rule, keys and winner."""
    from kerneldecl import flow
    from kerneldecl.cli import report

    workspace = _workspace(settings)
    chosen = set(_chosen(workspace, (pattern,)))
    entries = [e for e in flow.make_plan(workspace).entries if e.entry in chosen]
    _print(as_json, report.query_json(entries), report.query_text)


@main.command()
@click.argument("artifact", required=False, type=click.Path(path_type=Path))
@json_option
@click.pass_obj
def verify(settings: Settings, artifact: Path | None, as_json: bool) -> int:
    """Check an artifact's files against its manifest and run every kernel against its reference."""
    from kerneldecl.cli.verify import artifacts_of, verify_artifact, verify_text

    folders = [artifact] if artifact else artifacts_of(_workspace(settings))
    found: dict[str, Any] = {"schema": 1, "artifacts": [verify_artifact(folder, settings.root) for folder in folders]}
    _print(as_json, found, verify_text)
    return int(max((a["exit_code"] for a in found["artifacts"]), default=ExitCode.DONE))


@main.command()
@click.option("--propose-arch", is_flag=True, help="Print an arch file for this machine's GPU instead: save it as archs/NAME.toml.")
@json_option
@click.pass_obj
def doctor(settings: Settings, as_json: bool, propose_arch: bool) -> int:
    """Check this machine: tool versions, compilers, CPU, GPU, disk; and say what to do."""
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

    _print(as_json, {"schema": 1, "checks": rows}, text)
    return ExitCode.DONE if all(c.is_ok or not c.is_needed for c in checks) else ExitCode.ENVIRONMENT


@main.command()
@click.pass_obj
def schema(settings: Settings) -> None:
    """Print the JSON Schema of workloads.toml, rules' attributes included, for editors."""
    from kerneldecl.declare.json_schema import json_schema

    print(json.dumps(json_schema(settings.root), indent=1))


@main.group()
def cache() -> None:
    """Look after the store."""


@cache.command()
@json_option
@click.pass_obj
def stats(settings: Settings, as_json: bool) -> None:
    """Count what the store holds, and what of it is damaged."""
    from kerneldecl.store.local import LocalStore, store_stats

    found = store_stats(LocalStore(settings.root / "cache"))

    def text(value: Any) -> str:
        rows = [f"{row['kind']:<16} {row['count']:>8} files {row['bytes'] / 1e6:>10.2f} MB" for row in value["kinds"]]
        return "\n".join([*rows, f"{len(value['damaged'])} damaged", *(f"  {line}" for line in value["damaged"])])

    _print(as_json, found, text)
