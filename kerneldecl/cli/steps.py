"""Owns what `plan` and `why` say of a tuning that is to run: what of compiling, verifying and measuring it takes, and where.

Knows nothing of how entries are tuned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kerneldecl.hardware.gpu_lock import why_not_here
from kerneldecl.model import SPECIALIZE
from kerneldecl.planning.action import Action, State
from kerneldecl.store.keys import lines_of
from kerneldecl.store.local import Record
from kerneldecl.store.protocol import Store
from kerneldecl.store.results import groups_from_json
from kerneldecl.tuning.earlier import Earlier, Known
from kerneldecl.tuning.forecast import Forecast, forecast


class Steps(NamedTuple):
    """What tuning an entry takes."""

    forecast: Forecast
    missing_device: str
    """The model of GPU that it takes and that is not here; empty where it is here."""

    def __str__(self) -> str:
        if self.missing_device and self.forecast.candidates:
            return f"{self.forecast.candidates} candidates wait for {self.missing_device}, which is not here"
        if self.missing_device and self.forecast.verifies:
            return f"the winner is to be verified on {self.missing_device}, which is not here"
        return str(self.forecast)

    @property
    def json(self) -> dict[str, Any]:
        return {**self.forecast._asdict(), "missing_device": self.missing_device}


def steps_of(actions: Sequence[Action], store: Store) -> dict[str, Steps]:
    """Return what tuning takes, by entry, of those entries whose tuning is ready to run."""
    proposed = {action.entry: action.key for action in actions if action.kind == "propose" and action.is_hit}
    earlier: dict[bool, Earlier] = {}
    missing: dict[str, str] = {}
    found: dict[str, Steps] = {}
    for action in (action for action in actions if action.kind == "tune" and action.state is State.READY):
        sides = {is_local: store.read("propose", proposed[action.entry], is_local=is_local) for is_local in (False, True)}
        is_local, record = next((side, read) for side, read in sides.items() if isinstance(read, Record))
        if is_local not in earlier:
            earlier[is_local] = Earlier(store.all("tune", is_local=is_local))
        lines = {name: json.loads(value) for name, value in lines_of(action.manifest).items()}
        model = str(lines["arch.model"]) if lines["arch.kind"] == "cuda" else ""
        if model not in missing:
            missing[model] = model if model and why_not_here(model) else ""
        expected = _forecast(earlier[is_local].of(action.manifest), lines, record)
        found[action.entry] = Steps(expected, missing[model])
    return found


def _forecast(known: Known, lines: Mapping[str, Any], proposed: Record) -> Forecast:
    tolerance = float(lines["search.tolerance"])
    is_custom = f"templates.{SPECIALIZE}" in lines
    has_custom = any(candidate.template == SPECIALIZE for candidate in known.trials(tolerance))
    return forecast(groups_from_json(proposed.result), known, tolerance, may_have_more=is_custom and not has_custom)
