"""Owns the splitting of local arrays in CUDA source into smaller arrays and scalars, which shortens nvcc's compile time.

Knows nothing of compilers, flags or what kernels compute.

TVM unrolls loops over registers, which are arrays in its source. nvcc's time for an array grows with the square of its
accesses: a GEMM on CUDA cores has thousands, and they take half of nvcc's time. Here, elements that no vector access
spans become arrays of their own. Arrays of higher elements are declared first: then nvcc numbers registers as it does
for the whole array.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

MANY_ACCESSES = 1000
"""Fewest accesses to all arrays of a kernel at which splitting pays: with fewer, nvcc's time for arrays is negligible."""

_KERNEL = re.compile(r'^(?=extern "C" __global__)', re.MULTILINE)
_ARRAY = re.compile(r"^(?P<head> *(?:alignas\(\d+\) )?(?P<type>\w+)) (?P<name>\w+)\[\d+\];\n", re.MULTILINE)
_ACCESS = re.compile(r"\*\((?P<type>\w+?)(?P<lanes>[24])\*\)\((?P<vector>\w+) \+ (?P<first>\d+)\)|\b(?P<element>\w+)\[(?P<index>\d+)\]")
"""An access to a vector, or to one element."""
_WORD = re.compile(r"\w+")


def scalarized(source: str) -> str:
    """Return the source with those arrays split whose accesses all have constant indices; kernels with few accesses are unchanged."""
    return "".join(map(_scalarized_kernel, _KERNEL.split(source)))


def _scalarized_kernel(kernel: str) -> str:
    pieces = dict(_pieces(kernel, list(_ARRAY.finditer(kernel)))) if kernel.startswith("extern") else {}

    def declared(array: re.Match[str]) -> str:
        name = array["name"]
        own = (f"{array['head']} {_piece_name(name, piece)}[{len(piece)}];\n" for piece in reversed(pieces.get(name, ())))
        return "".join(own) or array[0]

    def accessed(access: re.Match[str]) -> str:
        name, index = _accessed_element(access)
        if name not in pieces:
            return access[0]
        piece = next(piece for piece in pieces[name] if index in piece)
        own, index = _piece_name(name, piece), index - piece.start
        return f"{own}[{index}]" if access["element"] else f"*({access['type']}{access['lanes']}*)({own} + {index})"

    return _ACCESS.sub(accessed, _ARRAY.sub(declared, kernel)) if pieces else kernel


def _piece_name(name: str, piece: range) -> str:
    return f"{name}_from_{piece.start}"


def _accessed_element(access: re.Match[str]) -> tuple[str, int]:
    """Return the array's name and the index of the first element accessed."""
    return access["vector"] or access["element"], int(access["first"] or access["index"])


def _pieces(kernel: str, arrays: Sequence[re.Match[str]]) -> Iterator[tuple[str, list[range]]]:
    """Yield the name of each array to be split, with the ranges of elements that stay together."""
    types = {array["name"]: array["type"] for array in arrays}
    declared = Counter(array["name"] for array in arrays)
    accesses: dict[str, list[range]] = defaultdict(list)
    for access in _ACCESS.finditer(_ARRAY.sub("", kernel)):
        name, index = _accessed_element(access)
        if name in types and (access["element"] or access["type"] == types[name]):
            accesses[name].append(range(index, index + int(access["lanes"] or 1)))
    if sum(map(len, accesses.values())) < MANY_ACCESSES:
        return
    mentions = Counter(_WORD.findall(kernel))
    for name, ranges in accesses.items():
        # Not an array that two scopes declare, or one accessed by a variable index, as another type or by its pointer.
        if declared[name] == 1 and mentions[name] == 1 + len(ranges):
            yield name, list(_merged(ranges))


def _merged(ranges: Iterable[range]) -> Iterator[range]:
    """Yield the ranges in order, those that overlap as one."""
    several = iter(sorted(set(ranges), key=lambda each: (each.start, each.stop)))
    last = next(several)
    for each in several:
        if each.start >= last.stop:
            yield last
            last = each
        last = range(last.start, max(last.stop, each.stop))
    yield last
