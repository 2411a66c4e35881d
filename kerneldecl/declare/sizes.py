"""Owns how large what is declared may be: whole numbers that kernels compute with, arguments that a machine can hold.

Knows nothing of tables, or of what rules compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from kerneldecl.diagnostics.signatures import type_text
from kerneldecl.model import Value, dtype_bytes
from kerneldecl.rule import Rule

MOST_NUMBER = 2**63 - 1
"""Kernels compute places with 64 bits."""
LEAST_FLOAT, MOST_FLOAT = 2.0**-149, 3.4028235e38
"""Magnitudes of float32, in which kernels compute with attributes: a smaller one is 0 there, a larger one infinity."""
MOST_BYTES = 1 << 42
"""Bytes of a call's arguments together: no GPU has the memory for more, and hardly a machine."""
MOST_RANK = 32
"""Extents of an argument: TVM takes minutes to lower a function of twice as many."""
_PLAINLY_SMALL = 1 << 36
"""Product of an entry's numbers up to which nobody asks how large its arguments are: sums of such products, of 8 bytes each."""


def is_countable(value: Value) -> bool:
    """Say whether kernels can compute with each whole number of a value."""
    if isinstance(value, tuple):
        return all(map(is_countable, value))
    return not isinstance(value, int) or -MOST_NUMBER - 1 <= value <= MOST_NUMBER


def is_float32(value: Value) -> bool:
    """Say whether each float of a value is a number of float32, rounded, and 0 only where it was 0."""
    if isinstance(value, tuple):
        return all(map(is_float32, value))
    return not isinstance(value, float) or value == 0 or LEAST_FLOAT <= abs(value) <= MOST_FLOAT or not math.isfinite(value)


def is_plainly_small(attrs: Mapping[str, Value]) -> bool:
    """Say whether arguments of a rule with these attributes cannot be too large, without asking it: there may be ten thousand entries."""
    product = 1
    for value in attrs.values():
        if isinstance(value, int):
            product *= value or 1
        elif isinstance(value, tuple) and value:
            if len(value) > MOST_RANK:
                return False
            product *= math.prod(number or 1 for number in _numbers(value))
    return abs(product) <= _PLAINLY_SMALL


def size_mistake(rule: Rule, attrs: Mapping[str, Value]) -> tuple[str, str] | None:
    """Return the attribute that is to blame, and a sentence, where the arguments of a rule with these attributes are too large."""
    args = rule.signature().args
    rank, longest = max((len(arg.shape), arg.name) for arg in args)
    if rank > MOST_RANK:
        ranks = {name: len(value) if isinstance(value, tuple) else 0 for name, value in attrs.items()}
        return max(ranks, key=ranks.__getitem__), f"argument {longest} has {rank} extents; expected at most {MOST_RANK}"
    nbytes = {arg: math.prod(arg.shape) * dtype_bytes(arg.dtype) for arg in args}
    if sum(nbytes.values()) <= MOST_BYTES:
        return None
    arg = max(nbytes, key=nbytes.__getitem__)
    largest = {name: max(map(abs, _numbers(value)), default=0) for name, value in attrs.items()}
    sentence = f"argument {arg.name} is {type_text(arg)}; expected arguments of at most {MOST_BYTES >> 40} TiB together"
    return max(largest, key=largest.__getitem__), sentence


def _numbers(value: Value) -> Iterator[int]:
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif type(value) is int:
        yield value
