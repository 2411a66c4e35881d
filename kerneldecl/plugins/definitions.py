"""Owns the parts of a Python source: what each definition of a module, and each method of its classes, means.

Knows nothing of files or keys. No key depends on parts: they give a difference its name.
"""

from __future__ import annotations

from collections.abc import Sequence

from kerneldecl.plugins.meaning import meant_lines
from kerneldecl.store.keys import digest

TOP_LEVEL = "top-level code"
_DIGITS = 12
"""Of a part's digest: it is compared with another of the same name alone."""


def definitions(source: bytes) -> dict[str, str]:
    """Return a digest of each definition by what it is: `function f`, `class C`, `function C.method`, `constant X`, `imports`.

    Decorators belong to what they decorate, other statements of a class to the class. What is no text has no parts.
    """
    parts: dict[str, list[str]] = {}
    owner, label, decorators = "", TOP_LEVEL, list[str]()
    for depth, tokens in meant_lines(source):
        line = f"{depth} {' '.join(tokens)}"
        if depth == 1 or (owner and depth == 2):
            if tokens[0] == "@":
                decorators.append(line)
                continue
            if depth == 1:
                owner = _named(tokens, "class")
                label = _label(tokens)
            else:
                label = f"function {owner}.{name}" if (name := _function(tokens)) else f"class {owner}"
        parts.setdefault(label, []).extend([*decorators, line])
        decorators = []
    return {name: digest("\n".join(lines).encode())[:_DIGITS] for name, lines in parts.items()}


def _label(tokens: Sequence[str]) -> str:
    for kind, name in (("function", _function(tokens)), ("class", _named(tokens, "class"))):
        if name:
            return f"{kind} {name}"
    if tokens[0] in {"from", "import"}:
        return "imports"
    is_assignment = len(tokens) > 1 and tokens[0].isidentifier() and tokens[1] in {"=", ":"} and tokens[0] not in {"try", "else"}
    return f"constant {tokens[0]}" if is_assignment else TOP_LEVEL


def _function(tokens: Sequence[str]) -> str:
    """Return the name of the function that a line begins; empty where it begins none."""
    return _named(tokens[1:] if tokens[0] == "async" else tokens, "def")


def _named(tokens: Sequence[str], keyword: str) -> str:
    """Return the name behind a keyword that begins a line; empty where it does not, or where there is none."""
    return tokens[1] if len(tokens) > 1 and tokens[0] == keyword else ""
