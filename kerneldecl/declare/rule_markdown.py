"""Owns a rule's page as Markdown: what it computes, an entry, its arguments in memory, its attributes, who serves it, figures.

Knows nothing of how kernels are chosen or measured: who serves a rule, and figures, are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kerneldecl.declare.catalogue import RulePage
from kerneldecl.declare.operator_names import names_of, operator_names
from kerneldecl.diagnostics.signatures import signature_text
from kerneldecl.model import dtype_bytes
from kerneldecl.signature import Arg

COMMAND = "kerneldecl rules --write docs/catalogue"


@dataclass(frozen=True)
class Serving:
    """Who serves a rule's example on one arch."""

    arch: str
    policy: str
    """The first policy of `auto` that proposes something; empty where none does."""
    templates: tuple[str, ...]
    """Templates of what it proposes, those that come first before others."""


@dataclass(frozen=True)
class Figure:
    """One tuned entry, as workloads.lock has it."""

    entry: str
    template: str
    time_us: float
    rate: str
    """Operations or bytes a second, in words."""


def page_text(page: RulePage, served: Sequence[Serving], figures: Sequence[Figure]) -> str:
    """Return the whole page."""
    return "\n".join([own_sections(page), *_served(served), "", *_figures(figures), ""])


def own_sections(page: RulePage) -> str:
    """Return what the rule itself says: all but who serves it and figures."""
    others = names_of(page.name)
    also = ["", f"Also looked for as {', '.join(others)}."] if others else []
    lines = [f"# {page.name}", "", f"<!-- Written by `{COMMAND}`; edit the rule instead. -->", "", *_formula(page.description), *also, ""]
    lines += ["## An entry", "", "```toml", page.example, "```", ""]
    if page.signature:
        lines += ["Its kernel:", "", "```", signature_text(f"my_{page.name}", page.signature), "```", ""]
        lines += ["## Arguments in memory", "", *_drawn(page.signature.args), ""]
    return "\n".join([*lines, "## Attributes", "", *_attributes(page), ""])


def index_text(pages: Sequence[RulePage]) -> str:
    """Return the table of all rules, and that of other names."""
    lines = ["# Operators", "", f"<!-- Written by `{COMMAND}`. -->", "", "A page a rule, from the rules themselves."]
    lines[-1] += " `kerneldecl rules RULE` shows the same in a terminal, also of your own rules and by the other names below."
    lines += ["", "| rule | computes |", "|---|---|"]
    lines += [f"| [{page.name}]({page.name}.md) | {_cell(_first(page.description))} |" for page in pages]
    lines += ["", "## By other names", "", "| name | declare |", "|---|---|"]
    lines += [f"| {name} | [{rule}]({rule}.md) with {_cell(how)} |" for name, (rule, how) in operator_names().items()]
    return "\n".join([*lines, "", f"Written by `{COMMAND}`; a test holds that the pages match the rules.", ""])


def _formula(description: str) -> list[str]:
    """Return the rule's sentence, its formula in front of it where it starts with one."""
    sentence = _first(description)
    formula, colon, rest = sentence.partition(": ")
    if " = " not in formula or not colon:
        return ["```", sentence, "```"]
    return ["```", formula, "```", "", rest[:1].upper() + rest[1:]]


def _first(description: str) -> str:
    return " ".join(description.partition("\n\n")[0].split())


def _drawn(arguments: Sequence[Arg]) -> list[str]:
    """Return how each argument of the example lies in memory: dense, the last axis fastest."""
    return ["```", *(f"{arg.name.ljust(max(len(each.name) for each in arguments))}  {_memory(arg)}" for arg in arguments), "```"]


def _memory(arg: Arg) -> str:
    item = dtype_bytes(arg.dtype)
    strides = [math.prod(arg.shape[at + 1 :]) * item for at in range(len(arg.shape))]
    axes = " x ".join(f"{extent} (every {stride} B)" for extent, stride in zip(arg.shape, strides, strict=True))
    return f"{arg.dtype} {axes or 'one element'}"


def _attributes(page: RulePage) -> Iterator[str]:
    yield from ("| attribute | default | takes | is |", "|---|---|---|---|")
    for each in sorted(page.attributes, key=lambda attribute: bool(attribute.default)):
        default = f"`{each.default}`" if each.default else "required"
        yield f"| `{each.name}` | {default} | {_cell(each.accepts)} | {_cell(each.summary)} |"


def _served(served: Sequence[Serving]) -> Iterator[str]:
    if not served:
        return
    yield from ("## Served by", "", "| arch | policy of `auto` | templates |", "|---|---|---|")
    for each in served:
        yield f"| {each.arch} | {each.policy or 'none'} | {', '.join(each.templates) or 'none'} |"
    if any(each.policy.endswith("_fallback") for each in served):
        yield from ("", "A fallback is right and slow: each result by one thread, without reuse of what is loaded.")


def _figures(figures: Sequence[Figure]) -> Iterator[str]:
    yield from ("## Figures on an H200", "")
    if not figures:
        yield "No entry of this repository's `workloads.toml` measures it."
        return
    yield from ("Cold caches, from [workloads.lock](../../workloads.lock); beside torch: [RESULTS](../../benchmarks/RESULTS.md).", "")
    yield from ("| entry | template | us | rate |", "|---|---|---|---|")
    for each in figures:
        yield f"| `{each.entry}` | {each.template} | {each.time_us:g} | {each.rate} |"


def _cell(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def pages_of(pages: Sequence[RulePage], served: Mapping[str, Sequence[Serving]], figures: Mapping[str, Sequence[Figure]]) -> dict[str, str]:
    """Return the text of each file by its name."""
    texts = {f"{page.name}.md": page_text(page, served.get(page.name, ()), figures.get(page.name, ())) for page in pages}
    return texts | {"README.md": index_text(pages)}
