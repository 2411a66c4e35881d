"""Owns the matching of a module's functions with an artifact's kernels, and the report of it.

Knows nothing of how a kernel replaces a function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import tvm
from tvm import relax

from kerneldecl.compiler.dynamic_shapes import only_outside_buckets
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.compiler.graph.places import refused_of
from kerneldecl.compiler.prim_funcs import SCHEDULED
from kerneldecl.relax.default_schedules import Compiled
from kerneldecl.relax.difference import Difference, difference, shape_of
from kerneldecl.relax.prebuilt import Kernel, Prebuilt

Outcome = Literal["hit", "view", "near miss", "miss", "other sizes", "scheduled before"]
"""Result of a match. A view needs no kernel: TVM's RewriteDataflowReshape gives a tensor of another shape over the same memory. Other
sizes are shapes outside of the shape buckets, left to TVM's default schedule."""


@dataclass(frozen=True)
class Match:
    """The result for one function."""

    function: str
    outcome: Outcome
    kernel: Kernel | None = None
    """The kernel of a hit; the closest one of a near miss."""
    reason: str = ""

    def __str__(self) -> str:
        entries = f" {', '.join(self.kernel.entries)}" if self.kernel else ""
        return f"{self.outcome:16} {self.function}:{entries}{': ' if entries and self.reason else ' ' if self.reason else ''}{self.reason}"


@dataclass(frozen=True)
class Report:
    """The matches of a module's functions with an artifact's kernels."""

    artifact: str
    matches: tuple[Match, ...]
    """Matches in order of the functions' names."""
    unused: tuple[str, ...]
    """Entries that no function matched."""
    in_parts: tuple[str, ...] = ()
    """What looks like a larger rule and stays several functions, each with its place and the reason."""
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    """How the functions without a kernel are compiled, once they are."""

    @property
    def hits(self) -> dict[str, Kernel]:
        return {match.function: match.kernel for match in self.matches if match.outcome == "hit" and match.kernel}

    @property
    def missed(self) -> tuple[Match, ...]:
        return tuple(match for match in self.matches if match.outcome in {"miss", "near miss"})

    @property
    def on_fallback(self) -> tuple[str, ...]:
        """Functions whose kernel is the fallback, which fits every function and is tuned to none."""
        return tuple(function for function, kernel in self.hits.items() if kernel.is_fallback)

    def __str__(self) -> str:
        needed = sum(match.outcome != "view" for match in self.matches)
        fallbacks = f", {len(self.on_fallback)} of them fallbacks" if self.on_fallback else ""
        headline = f"{self.artifact}: kernels for {len(self.hits)} of {needed} functions{fallbacks}"
        rest = [f"unused           {', '.join(self.unused)}"] if self.unused else []
        rest += [f"in parts         {each}" for each in self.in_parts]
        return "\n".join([headline, *(f"  {line}" for line in [*map(self._line, self.matches), *rest])])

    def _line(self, match: Match) -> str:
        if match.function in self.on_fallback:
            return f"{match} (fallback)"
        compiled = self.compiled.get(match.function)
        return f"{match}; {compiled}" if compiled and match.outcome != "view" else str(match)


def match(mod: tvm.IRModule, prebuilt: Prebuilt, arch: str = "", *, is_linked: bool = True) -> Report:
    """Look for a kernel for every PrimFunc of a module; with an `arch` for one that can be compiled for it.

    `is_linked` says whether kernels' objects are linked with the module, rather than their schedules compiled in it.
    """
    found = tuple(_matches(mod, prebuilt.kernels, arch, is_linked=is_linked))
    used = {each.kernel.digest for each in found if each.outcome == "hit" and each.kernel}
    unused = sorted(entry for kernel in prebuilt.kernels if kernel.digest not in used for entry in kernel.entries)
    return Report(prebuilt.name, found, tuple(unused), tuple(refused_of(mod)))


def _matches(mod: tvm.IRModule, kernels: Sequence[Kernel], arch: str, *, is_linked: bool) -> Iterator[Match]:
    by_digest = {kernel.digest: kernel for kernel in kernels}
    functions = {var.name_hint: func for var, func in mod.functions.items() if isinstance(func, tvm.tirx.PrimFunc)}
    outside = only_outside_buckets(mod)
    for name, func in sorted(functions.items()):
        if (func.attrs or {}).get(SCHEDULED):
            yield Match(name, "scheduled before")
        elif kernel := by_digest.get(match_digest(func)):
            reason = _why_not_compiled(kernel, arch, is_linked=is_linked)
            yield Match(name, "near miss" if reason else "hit", kernel, reason)
        elif relax.analysis.has_reshape_pattern(func):
            yield Match(name, "view")
        else:
            missed = _missed(name, func, kernels)
            yield Match(name, "other sizes", reason=missed.reason) if name in outside else missed


def _missed(name: str, func: Any, kernels: Sequence[Kernel]) -> Match:
    try:
        shape = shape_of(func)
    except (TypeError, ValueError) as error:
        return Match(name, "miss", reason=str(error))
    fixed = (kernel for kernel in kernels if not kernel.upto)
    close = [(kernel, found) for kernel in fixed if (found := difference(shape, kernel.shape))]
    if not close:
        return Match(name, "miss", reason="no kernel is close to it")
    kernel, first = min(close, key=lambda pair: (pair[1].rank, pair[0].entries))
    return Match(name, "near miss", kernel, _reason(first))


def _why_not_compiled(kernel: Kernel, arch: str, *, is_linked: bool) -> str:
    """Return why a kernel cannot be compiled with a module, with what can be done about it; empty where it can, or is linked."""
    if kernel.calls_library and not is_linked:
        return 'library: the kernel calls a vendor\'s library, by functions that are linked with it; use mode "binary"'
    if not arch or kernel.arch in {"", arch}:
        return ""
    return f'arch: the kernel is for {kernel.arch} alone, the target is {arch}; compile for {kernel.arch}, or use mode "binary"'


def _reason(first: Difference) -> str:
    return f"{first.kind}: {first.sentence}"
