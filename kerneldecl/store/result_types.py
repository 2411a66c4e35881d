"""Owns what a record's result must look like before anybody relies on it: its fields and their types, by kind of record.

Knows nothing of what the fields are for. A record is a file that others wrote: a field that becomes a file's name or a number must
be one. Trials and iteration spaces are checked where they are read (`results`): a plan of ten thousand entries parses none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from kerneldecl.limits import BUDGET
from kerneldecl.store.inside import is_digest
from kerneldecl.store.keys import symbol
from kerneldecl.store.record_text import Fields

Check = Callable[[Any], bool]
_ABSENT = object()
"""In place of a field that is not there: it passes no check."""


def _is_number(value: object) -> bool:
    return type(value) in {int, float} and math.isfinite(value)  # type: ignore[arg-type]  # just checked


def _is_number_or_none(value: object) -> bool:
    return value is None or _is_number(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _are_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def are_timings(value: object) -> bool:
    """Say whether a value is samples in JSON, by protocol; none of these is empty."""
    return isinstance(value, dict) and all(_are_numbers(samples) and samples for samples in value.values())


def _are_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _are_places(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, list) and len(item) == 2 and all(map(_is_count, item)) for item in value)


_GROUP = frozenset({"policy", "count", "digest", "templates", "searches", "text"})


def _are_groups(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_group, value))


def _is_options_text(text: object) -> bool:
    """Say whether a text is empty or a table as JSON whose budget, if it has any, is of numbers."""
    if not isinstance(text, str):
        return False
    try:
        options = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return False
    return isinstance(options, dict) and all(_is_number(options.get(name, 0)) for name in BUDGET)


def _is_sources_text(text: object) -> bool:
    """Say whether a text is empty or a list of tables of texts as JSON."""
    if not isinstance(text, str):
        return False
    try:
        sources = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return False
    return isinstance(sources, list) and all(map(_are_texts, sources))


def _has_turn(group: Mapping[str, Any]) -> bool:
    """Say whether a group has the fields of one that is not alone or reads records, and these are right."""
    is_known = group.keys() - {"turn", "options", "sources"} == _GROUP
    texts = _is_options_text(group.get("options", "")) and _is_sources_text(group.get("sources", ""))
    return is_known and texts and _is_count(group.get("turn", 0))


def _is_group(group: object) -> bool:
    templates = group.get("templates") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(templates, list):
        return False
    if group.keys() != _GROUP and not _has_turn(group):
        return False
    names = (group["policy"], *templates)
    if not _is_count(group["count"]) or type(group["searches"]) is not bool:
        return False
    return {*map(type, names), type(group["text"]), type(group["digest"])} == {str} and all(map(str.isidentifier, names))


def is_candidate(value: object) -> bool:
    """Say whether a value is a candidate in JSON: its template's name is an identifier, for it names a file."""
    if not isinstance(value, dict) or not isinstance(value.get("params"), dict):
        return False
    return isinstance(value.get("template"), str) and value["template"].isidentifier()


def is_argument(value: object) -> bool:
    """Say whether a value is an argument in JSON, with positive extents."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get("dtype"), str):
        return False
    shape = value.get("shape")
    return isinstance(shape, list) and all(type(extent) is int and extent > 0 for extent in shape)


_ARGUMENT = r'\{"dtype":"[^"\\]*","name":"[^"\\]*","shape":\[(?:[1-9][0-9]*(?:,[1-9][0-9]*)*)?\]\}'
_ARGUMENTS = rf"\[(?:{_ARGUMENT}(?:,{_ARGUMENT})*)?\]"
_PLAIN_SIGNATURE = re.compile(rf'\{{"inputs":{_ARGUMENTS},"outputs":{_ARGUMENTS}\}}')


def _is_signature_text(text: str) -> bool:
    """Say whether a text is a signature: plainly, or once it is parsed, which takes longer than all else of its record."""
    if _PLAIN_SIGNATURE.fullmatch(text):
        return True
    try:
        return is_signature(json.loads(text))
    except (ValueError, RecursionError):
        return False


def is_signature(value: object) -> bool:
    """Say whether a value has the inputs and outputs of a kernel in JSON."""
    if not isinstance(value, dict):
        return False
    sides = all(isinstance(value.get(side), list) and all(map(is_argument, value[side])) for side in ("inputs", "outputs"))
    updated = value.get("updated", 0)
    return sides and type(updated) is int and 0 <= updated <= len(value["outputs"])


_WINNER: Mapping[str, Check] = {
    "computation": is_digest,
    "symbol": _is_text,
    "tolerance": _is_number,
    "policy": _is_text,
    "winner": is_candidate,
    "is_measured": _is_flag,
    "measured": _is_count,
    "wanted": _is_count,
    "run_secs": _is_number,
    "error": _is_number_or_none,
    "tied": _is_count,
    "build_key": is_digest,
    "object": is_digest,
    "database": is_digest,
    "source": is_digest,
    "trials": _are_tables,
    "provenance": _are_texts,
}


def _are_ranges(value: object) -> bool:
    return bool(value) and _are_places(value)


FIELDS: Mapping[str, Mapping[str, Check]] = {
    "lower": {
        "computation": is_digest,
        "signature": is_signature,
        "flops": _is_number,
        "least_bytes": _is_number,
        "tolerance": _is_number,
        "space": _is_table,
    },
    "propose": {"groups": _are_groups},
    "tune": _WINNER,
    "rank": _WINNER,
    "rows": {"ranges": _are_ranges, "is_measured": _is_flag, "secs": _is_table, "verified": _are_numbers, "provenance": _are_texts},
    "build": {"code_digest": is_digest, "code_bytes": _is_count},
    "measure": {"error": _is_number_or_none, "samples": _are_numbers, "failure": _is_text, "reference": _is_text},
}
"""Fields that a record of each kind must have, each with its check; records of other kinds have none that are read."""
_OPTIONAL: Mapping[str, Mapping[str, Check]] = {
    "measure": {"timings": are_timings},  # records of earlier versions have none
    "lower": {"names": _is_text, "varying": _are_places, "any_rows": is_digest},
    "tune": {"before": _are_tables, "idea_of": _are_texts},
    "rank": {"idea_of": _are_texts},
}
"""Fields that a record of a kind may have."""
_AS_TEXT: Mapping[str, Callable[[str], bool]] = {"signature": _is_signature_text}
"""Checks of fields that are text; the others are checked where they are parsed."""


def wrong_field(kind: str, result: Mapping[str, Any]) -> str:
    """Return the first field that is not what records of the kind have there; empty where all are. What is text is checked when parsed."""
    parsed, late = (result.parsed, result.late) if type(result) is Fields else (result, {})
    for name, is_right in FIELDS.get(kind, {}).items():
        if name in late:
            if name in _AS_TEXT and not _AS_TEXT[name](late[name]):
                return name
        elif not is_right(parsed.get(name, _ABSENT)):
            return name
    wrong = (name for name, is_right in _OPTIONAL.get(kind, {}).items() if name in parsed and not is_right(parsed[name]))
    is_foreign = kind in {"tune", "rank"} and parsed["symbol"] != symbol(parsed["computation"])
    return next(wrong, "symbol" if is_foreign else "")
