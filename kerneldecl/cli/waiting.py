"""Owns the line that a terminal shows while a command works on a model, which takes from seconds to minutes.

Knows nothing of what the work is. The line vanishes when the work is done; streams that are no terminal never have it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def waiting(doing: str) -> Iterator[None]:
    """Show what is being done, on standard error, until it is done."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(doing)):
        yield
