"""Owns the entry point: answers a null build at once and leaves everything else to the command line proper.

Knows nothing of options beyond those a plain build may have.
"""

from __future__ import annotations

import os
import sys

_QUIET = ("-q", "--quiet")


def main() -> int:
    """Run the command and return its exit code."""
    try:
        entries = _fresh_entries(sys.argv[1:])
        if entries is None:
            import signal  # takes longer than a null build's own work

            signal.signal(signal.SIGINT, _end)  # an import may turn a KeyboardInterrupt into another error
    except KeyboardInterrupt:
        _end()
    if entries is not None and _is_told(entries):
        return 0
    from kerneldecl.cli.commands import run

    return run()


def _is_told(entries: int) -> bool:
    """Say that there is nothing to do, unless that is not wanted; return False where it cannot be written, which the command words."""
    if any(option in sys.argv for option in _QUIET):
        return True
    try:
        sys.stdout.write(f"{entries} {'entry' if entries == 1 else 'entries'}: {entries} up to date\n")
        sys.stdout.flush()
    except (AttributeError, OSError):  # it is closed, or full
        return False
    return True


def _end(*_: object) -> None:
    """End at once: until the command line proper takes over there is nothing to be put away, and nothing to say."""
    os._exit(130)


def _fresh_entries(arguments: list[str]) -> int | None:
    """Return the number of entries if this is a build of everything and there is nothing to do, else None."""
    root, rest = ".", [option for option in arguments if option not in _QUIET]
    if "-C" in rest[:-1]:
        place = rest.index("-C")
        root = rest[place + 1]
        del rest[place : place + 2]
    if rest not in (["build"], ["build", "--locked"]):
        return None
    from kerneldecl.null_build.stamp import is_fresh

    try:
        return is_fresh(os.path.abspath(root))
    except FileNotFoundError:  # the current folder is gone, which the command words
        return None


if __name__ == "__main__":
    exit_code = main()
    if "kerneldecl.cli.commands" in sys.modules:
        sys.exit(exit_code)
    # After a null build nothing is to be put away, which would take a tenth of it.
    try:
        sys.stdout.flush()
    finally:
        os._exit(exit_code)
