"""Owns a worker that answers in the test's own process: a real one imports TVM first, which takes seconds.

Knows nothing of what is asked.
"""

from __future__ import annotations

import sys
from typing import Any

from kerneldecl.runners import worker


class InThisProcess:
    """Stands in for `kerneldecl.runners.process.Worker`."""

    def __init__(self, _: object, **_limits: object) -> None:
        pass

    def call(self, request: dict[str, Any], _: float) -> dict[str, Any]:
        return worker._answered(request)

    def stop(self) -> None:
        sys.modules.pop("nets", None)  # the module with a test's models: another test has another one
