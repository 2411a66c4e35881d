"""Owns the tests that mutants of declarations, locks, records, artifacts, bundles and plug-ins end in sentences, never in a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.mutants import KINDS, Mutants, mutated_json, run_mutants

FAST, SLOW = 6, 1_000


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        return Mutants(tmp_path_factory.mktemp("mutants"), seed=7)


@pytest.mark.parametrize("kind", KINDS)
def test_mutants_end_in_sentences(mutants: Mutants, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    assert list(filter(None, (mutants.run(kind, number) for number in range(FAST)))) == []


@pytest.mark.slow
def test_a_thousand_mutants_end_in_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    assert [found for _, found in run_mutants(tmp_path, SLOW, seed=11) if found] == []


def test_a_mutant_differs_and_comes_again_with_its_seed() -> None:
    value = {"a": [1, {"b": "c"}], "d": {"e": 2.0}}
    found = [mutated_json(value, random.Random(seed)) for seed in range(50)]
    assert sum(repr(each) != repr(value) for each in found) >= 45
    assert repr(found) == repr([mutated_json(value, random.Random(seed)) for seed in range(50)])
    assert len({repr(each) for each in found}) > 20
