"""Owns the tests of which calls travel together, and when.

Knows nothing of Dask.
"""

from __future__ import annotations

import pytest

from kerneldecl.cluster.parcels import HOLD_SECS, MOST_CALLS, PARCEL_SECS, PROBES, Call, Parcel, Parcels, Waiting


def waiting(parcels: Parcels, count: int, kind: str = "lower", since_secs: float = 0.0) -> None:
    for place in range(count):
        parcels.add(Waiting(Call(print, (), "compile", kind, priority=-place), print, since_secs))


def sizes(taken: list[Parcel]) -> list[int]:
    return [len(parcel) for parcel in taken]


def known(secs: float) -> Parcels:
    """Return parcels of which a call of the kind took so long."""
    parcels = Parcels()
    waiting(parcels, 1)
    (probe,) = parcels.take(0.0)
    parcels.returned(probe, secs)
    return parcels


def test_calls_that_may_take_long_travel_alone_and_not_all_at_once() -> None:
    parcels = Parcels()
    waiting(parcels, PROBES + 5)
    assert sizes(parcels.take(0.0)) == [1] * PROBES
    assert parcels.take(1.0) == []
    assert parcels.due_secs(1.0) is None, "only an answer sends more"


def test_short_calls_travel_together() -> None:
    parcels = known(PARCEL_SECS / 10)
    waiting(parcels, 95)
    assert sum(sizes(parcels.take(0.0))) == 95
    waiting(parcels, 95)
    assert max(sizes(parcels.take(0.0))) == 10
    parcels = known(0.0)
    waiting(parcels, 10 * MOST_CALLS)
    assert sizes(parcels.take(0.0)) == [MOST_CALLS] * 10


def test_a_few_short_calls_wait_for_others_a_while() -> None:
    parcels = known(PARCEL_SECS / 10)
    waiting(parcels, 3, since_secs=1.0)
    assert parcels.take(1.0) == []
    assert parcels.due_secs(1.0) == pytest.approx(HOLD_SECS)
    assert sizes(parcels.take(1.0 + HOLD_SECS)) == [3]


def test_long_calls_travel_alone_and_at_once() -> None:
    parcels = known(2 * PARCEL_SECS)
    waiting(parcels, 200)
    assert sizes(parcels.take(0.0)) == [1] * 200


def test_calls_without_a_kind_travel_alone_and_at_once_whatever_is_known() -> None:
    parcels = known(0.0)
    waiting(parcels, 3, kind="")
    taken = parcels.take(0.0)
    assert sizes(taken) == [1, 1, 1]
    assert [parcel[0].call.priority for parcel in taken] == [0, -1, -2]
    for parcel in taken:
        parcels.returned(parcel, 0.0)
    waiting(parcels, 3, kind="")
    assert sizes(parcels.take(0.0)) == [1, 1, 1]


def test_what_waits_is_given_up_once() -> None:
    parcels = Parcels()
    waiting(parcels, 2)
    assert len(parcels.clear()) == 2
    assert parcels.clear() == []
    assert parcels.take(9.0) == []
