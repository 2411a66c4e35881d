"""Owns how a thread's arrays stand in CUDA source: in parts, so that nvcc is done sooner.

Knows nothing of compilers, flags or what kernels compute.

TVM spells out loops over registers, which are arrays in its source, and what nvcc spends on an array grows with the square of its
accesses: on a product on CUDA cores, which has thousands, half of its time. Here, places that are never accessed together become
arrays of their own. The last ones are declared first: nvcc then numbers them as it numbers the places of one array.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

MANY_ACCESSES = 1000
"""To all arrays of a kernel. Fewer take nvcc no time."""

_KERNEL = re.compile(r'^(?=extern "C" __global__)', re.MULTILINE)
_ARRAY = re.compile(r"^(?P<head> *(?:alignas\(\d+\) )?(?P<type>\w+)) (?P<name>\w+)\[\d+\];\n", re.MULTILINE)
_ACCESS = re.compile(r"\*\((?P<type>\w+?)(?P<lanes>[24])\*\)\((?P<vector>\w+) \+ (?P<first>\d+)\)|\b(?P<element>\w+)\[(?P<place>\d+)\]")
"""Of a vector, or of an element."""
_WORD = re.compile(r"\w+")


def in_parts(source: str) -> str:
    """Return the source with those arrays in parts of which it says at which places it accesses them; kernels with few accesses stay."""
    return "".join(map(_kernel_in_parts, _KERNEL.split(source)))


def _kernel_in_parts(kernel: str) -> str:
    parts = dict(_parts(kernel, list(_ARRAY.finditer(kernel)))) if kernel.startswith("extern") else {}

    def declared(array: re.Match[str]) -> str:
        name = array["name"]
        own = (f"{array['head']} {_named(name, part)}[{len(part)}];\n" for part in reversed(parts.get(name, ())))
        return "".join(own) or array[0]

    def accessed(access: re.Match[str]) -> str:
        name, place = _place(access)
        if name not in parts:
            return access[0]
        part = next(part for part in parts[name] if place in part)
        own, place = _named(name, part), place - part.start
        return f"{own}[{place}]" if access["element"] else f"*({access['type']}{access['lanes']}*)({own} + {place})"

    return _ACCESS.sub(accessed, _ARRAY.sub(declared, kernel)) if parts else kernel


def _named(name: str, part: range) -> str:
    return f"{name}_from_{part.start}"


def _place(access: re.Match[str]) -> tuple[str, int]:
    return access["vector"] or access["element"], int(access["first"] or access["place"])


def _parts(kernel: str, arrays: Sequence[re.Match[str]]) -> Iterator[tuple[str, list[range]]]:
    """Yield the arrays that are to be cut, each with the places that are accessed together."""
    types = {array["name"]: array["type"] for array in arrays}
    declared = Counter(array["name"] for array in arrays)
    accesses: dict[str, list[range]] = defaultdict(list)
    for access in _ACCESS.finditer(_ARRAY.sub("", kernel)):
        name, place = _place(access)
        if name in types and (access["element"] or access["type"] == types[name]):
            accesses[name].append(range(place, place + int(access["lanes"] or 1)))
    if sum(map(len, accesses.values())) < MANY_ACCESSES:
        return
    words = Counter(_WORD.findall(kernel))
    for name, places in accesses.items():
        # Not what two scopes declare, or what is accessed as a whole, at a place that varies or as another type.
        if declared[name] == 1 and words[name] == 1 + len(places):
            yield name, list(_joined(places))


def _joined(places: Iterable[range]) -> Iterator[range]:
    """Yield the places in order, as one what overlaps."""
    several = iter(sorted(set(places), key=lambda each: (each.start, each.stop)))
    last = next(several)
    for each in several:
        if each.start >= last.stop:
            yield last
            last = each
        last = range(last.start, max(last.stop, each.stop))
    yield last
