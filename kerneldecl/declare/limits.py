"""Owns the table `[limits]` of workloads.toml: what workers and the store may use.

Knows nothing of processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kerneldecl.declare.toml_keys import Key
from kerneldecl.limits import Limits

_SUMMARIES = {
    "build_secs": "Seconds to lower a rule or to build a candidate",
    "propose_secs": "Seconds to ask a policy for an entry's candidates",
    "search_secs": "Seconds to ask a policy that searches for its next candidates",
    "prepare_secs": "Seconds to make an entry's inputs and reference",
    "verify_secs": "Seconds to verify a candidate",
    "sample_secs": "Seconds for one sample of a candidate's time",
    "memory_gib": "GiB of private memory of a process; three quarters of the machine's by default",
    "output_mib": "MiB that a request may print or answer",
    "store_gb": "GB that the store may hold; what was not used for longest is removed after a build, once a day",
}


def _is_positive(value: object) -> bool:
    return type(value) in {int, float} and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]  # both are numbers


def _key(field: dataclasses.Field[float]) -> Key:
    default = f"; {field.default:g} by default" if field.default else ""
    return Key(_is_positive, "a number above 0", {"type": "number", "exclusiveMinimum": 0}, f"{_SUMMARIES[field.name]}{default}.")


LIMITS: Mapping[str, Key] = {field.name: _key(field) for field in dataclasses.fields(Limits)}


def limits_of(table: Mapping[str, Any]) -> Limits:
    """Return the limits of a checked table, completed by the defaults."""
    return Limits(**{name: float(value) for name, value in table.items()})
