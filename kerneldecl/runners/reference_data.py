"""Owns the case that kernels are checked and timed with: a workload's random inputs, and what its reference makes of them.

Knows nothing of kernels or devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from kerneldecl.arrays import Array
from kerneldecl.model import Signature
from kerneldecl.plugins.load import load_rule

Brought = TypeVar("Brought")


@dataclass(frozen=True)
class Case:
    """Inputs and expected outputs, in the signature's order."""

    signature: Signature
    inputs: tuple[Array, ...]
    """As the rule makes them."""
    expected: tuple[Array, ...]
    """Of the outputs' shapes; of a higher precision than theirs."""


def make_case(described: Mapping[str, Any]) -> Case:
    """Make the case from root, rule, attrs and seed."""
    root = Path(described["root"])
    rule = load_rule(root, described["rule"]).of(root, described["attrs"])
    signature = rule.signature()
    inputs = tuple(rule.inputs(np.random.default_rng(described["seed"])))
    found = rule.reference(*inputs)
    several = [found] if isinstance(found, np.ndarray) else list(found)
    expected = tuple(np.asarray(want).reshape(arg.shape) for want, arg in zip(several, signature.outputs, strict=True))
    return Case(signature, inputs, expected)


class AtHand(Generic[Brought]):
    """Holds what a worker has brought to its device for one case; brings it again where a crash took the process that had it."""

    def __init__(self, bring: Callable[[Case], Brought], close: Callable[[Brought], object] = lambda _: None) -> None:
        self._bring, self._close = bring, close
        self._held: dict[str, Brought] = {}
        """One at most, under the text that describes its case."""
        self._coming: dict[str, Future[Case]] = {}
        """The same of what is still made."""
        self._maker = ThreadPoolExecutor(1, "next-case")

    def of(self, described: Mapping[str, Any]) -> Brought:
        text = json.dumps(described, sort_keys=True)
        if text not in self._held:
            coming = self._coming.pop(text, None)
            self.clear()
            self._held[text] = self._bring(coming.result() if coming else make_case(described))
        return self._held[text]

    def foresee(self, described: Mapping[str, Any]) -> None:
        """Begin to make a case, beside what else is done, that is to be at hand after this one."""
        text = json.dumps(described, sort_keys=True)
        if text not in self._held and text not in self._coming:
            self._coming = {text: self._maker.submit(make_case, described)}

    def clear(self) -> None:
        while self._held:
            self._close(self._held.popitem()[1])
