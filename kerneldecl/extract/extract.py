"""Owns the extraction of a model into a workspace: a worker reads the model, its functions become files and entries.

Knows nothing of TVM nor of how entries are written as text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from kerneldecl.declare.document import declare, declared, decode, parse, scope_of
from kerneldecl.declare.toml_keys import FILE
from kerneldecl.diagnostics import line_numbers
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.extract.coverage import Coverage, Work, coverage
from kerneldecl.extract.edit_toml import HEADER, Function, MarkedRows, Merged, Table, merge, tag_word
from kerneldecl.extract.expected_fallbacks import expected_fallbacks
from kerneldecl.model import frozen
from kerneldecl.planning.fallbacks import share_text
from kerneldecl.plugins.load import load_arch
from kerneldecl.runners.process import Worker
from kerneldecl.serial import to_json
from kerneldecl.store.files import ignore_results, write_whole

FUNCTIONS = "functions"
"""Folder of functions without a standard rule; each file is named by the digest of its computation."""
_LIMIT_SECS = 1800.0
_WAY_OUT = "if it has dynamic dimensions, export it with static ones"


class AnyRows(NamedTuple):
    """A dynamic dimension of a model whose size is known when kernels are called."""

    dim: str
    tuned: tuple[int, ...]
    upto: int


def extract_model(
    model: str, root: Path, sizes: Mapping[str, Sequence[int]] | None = None, dtype: str = "", rows: AnyRows | None = None
) -> dict[str, Any]:
    """Add entries for a model's functions to the workspace's file, which is created if missing; return a summary.

    `sizes` are those for which a dynamic dimension of the model gets entries, `rows` is the one of which they take any size. `dtype` is the
    half precision that a float32 model gets.

    Raise DeclarationError where the model cannot be read or the file has mistakes; nothing is written then.
    """
    name = model_name(model)
    file = root / FILE
    content = file.read_bytes() if file.exists() else HEADER.format(name=json.dumps(name)).encode()
    tables = _tables(root, content)
    options = {"sizes": {dim: list(extents) for dim, extents in (sizes or {}).items()}, "dtype": dtype, "targets": _targets(root, content)}
    answer = _read_by_a_worker(model, root, {**options, **({"rows": rows.dim} if rows else {})})
    marked = MarkedRows(answer["marker"], rows.tuned, rows.upto) if rows else None
    functions = {_function(found, marked): found for found in answer["functions"]}
    if not functions:
        raise _failure(model, "none of its functions can be an entry", _why_none(answer))
    merged = merge(decode(content), tables, functions, name)
    _write(root, merged, {dict(function.attrs)["file"]: found["ir"] for function, found in functions.items() if "ir" in found})
    counts = {"new": merged.new, "known": merged.known, "changed": merged.changed, "gone": merged.unused}
    said = {"coverage": _coverage(answer), "fallbacks": expected_fallbacks(root, name, functions)}
    left = {"left_out": answer["left_out"], "in_parts": [each for each in answer["in_parts"] if each["what"] or each["noted"]]}
    return {"schema": 1, "model": name, "file": str(file), **left, **said, **counts}


def model_name(model: str) -> str:
    """Return what a model's entries are tagged with: the stem of its file, or the name of the Python attribute."""
    return tag_word(Path(model).stem if Path(model).suffix else model.rpartition(":")[2])


def sizes_of(dims: Sequence[str]) -> dict[str, list[int]]:
    """Return the sizes of each dimension from texts such as n=1,16,128; raise DeclarationError for any other text."""
    sizes: dict[str, list[int]] = {}
    for text in dims:
        found = re.fullmatch(r"([A-Za-z_]\w*)=(\d+(?:,\d+)*)", text)
        if found is None or found[1] in sizes:
            sentence = "not a dimension with its sizes" if found is None else f"the sizes of {found[1]} are given already"
            raise DeclarationError([Problem(f"--dim {text}", sentence, "expected each dimension once, such as --dim n=1,16,128")])
        sizes[found[1]] = [int(size) for size in found[2].split(",")]
    return sizes


def any_rows_of(text: str) -> AnyRows:
    """Return the dimension that a text such as n=1,16,128..4096 is of; raise DeclarationError for any other text."""
    found = re.fullmatch(r"([A-Za-z_]\w*)=(\d+(?:,\d+)*)\.\.(\d+)", text)
    if found is None:
        sentence, hint = "not a dimension with the sizes to tune and the largest", "expected it as in --rows n=1,16,128..4096"
        raise DeclarationError([Problem(f"--rows {text}", sentence, hint)])
    return AnyRows(found[1], tuple(sorted({int(size) for size in found[2].split(",")})), int(found[3]))


def _read_by_a_worker(model: str, root: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    worker = Worker({}, folder=Path.cwd())  # what the user names is relative to it
    try:
        answer = worker.call({"action": "extract", "root": str(root), "model": model, **options}, _LIMIT_SECS)
    finally:
        worker.stop()
    if "problem" in answer:
        raise _failure(model, answer["problem"], answer["hint"])
    if "failure" in answer:
        is_tvms = "InternalError" in answer["failure"]  # which says nothing to a user
        raise _failure(model, f"reading and lowering it failed: {answer['failure']}", _WAY_OUT if is_tvms else "")
    return answer


def _failure(model: str, sentence: str, hint: str = "") -> DeclarationError:
    return DeclarationError([Problem(model, sentence, hint)])


def _why_none(answer: Mapping[str, Any]) -> str:
    """Return the sizes to declare where all extents are dynamic, else the first reasons."""
    reasons = [each["reason"] for each in answer["left_out"]]
    if dims := [dim for dim in answer["dims"] if any("dynamic extent" in reason for reason in reasons)]:
        sizes = " ".join(f"--dim {dim}=1,16" for dim in dims)
        return f"all have a dynamic extent; declare the sizes that matter, as in {sizes}, or any number of rows by --rows"
    return "; ".join(f"{each['name']}: {each['reason']}" for each in answer["left_out"][:3])


def _coverage(answer: Mapping[str, Any]) -> dict[str, float]:
    """Return what standard rules compute of the model as the first target has it."""
    first: list[str] = next((each["targets"] for each in answer["in_parts"]), [])[:1]
    functions = (each for each in answer["functions"] if not first or not each["targets"] or first[0] in each["targets"])
    return asdict(coverage(Work(rule=each["rule"], calls=each["calls"], **each["work"]) for each in functions))


def _function(found: Mapping[str, Any], rows: MarkedRows | None) -> Function:
    shared: dict[str, Any] = {
        "name": found["name"],
        "rule": found["rule"],
        "calls": found["calls"],
        "places": tuple(found.get("places", ())),
        "targets": tuple(found.get("targets", ())),
        "rows": rows,
    }
    if found["rule"] == "tensor_ir":
        file = (("file", f"{FUNCTIONS}/{found['computation'][:20]}.json"),)
        return Function(**shared, attrs=file, identity=file)
    attrs, identity = (tuple((key, frozen(value)) for key, value in found[what].items()) for what in ("attrs", "identity"))
    return Function(**shared, attrs=attrs, identity=identity)


def _targets(root: Path, content: bytes) -> list[dict[str, Any]]:
    """Return the targets that new entries are built for, each with its arch and the policy that it is asked by."""
    document = parse(content)
    defaults = scope_of(root, document).defaults
    archs = dict(declared(root, document, ()).targets)
    loaded = ((target, load_arch(root, archs[target])) for target in defaults.targets)
    return [{"name": target, "arch": to_json(arch), "policy": defaults.policy} for target, arch in loaded]


def _in_parts(found: Mapping[str, Any]) -> str:
    """Return what stays several functions, and what is of a more general rule, in a line for each reason."""
    places: dict[tuple[str, str], list[str]] = {}
    for word, texts in (("in parts", found["what"]), ("general", found["noted"])):
        for each in texts:
            place, _, reason = each.partition(": ")
            places.setdefault((word, reason), []).append(place)
    targets = f" for {', '.join(found['targets'])}" if found["targets"] else ""
    rests = {key: f" and {len(names) - 1} more" if len(names) > 1 else "" for key, names in places.items()}
    return "\n".join(f"  {key[0]} {names[0]}{rests[key]}{targets}: {key[1]}" for key, names in places.items())


def _tables(root: Path, content: bytes) -> list[Table]:
    """Return the tables of the workspace's file; raise DeclarationError for a file with mistakes."""
    tables = parse(content).get("workload", [])
    if not tables:
        return []
    workloads = declare(root, content).workloads
    text = decode(content)
    lines = line_numbers.array_lines(text, "workload", len(tables))
    if not text.split("\n")[lines[0] - 1].lstrip().startswith("[["):
        sentence = "the entries are in an inline array, to which no table can be added"
        raise DeclarationError([Problem(FILE, sentence, "write each as a table [[workload]]", line=lines[0])])
    expanded = {line: tuple((w.rule, w.attrs) for w in workloads if w.line == line) for line in lines}
    return [Table(line, table["name"], tuple(table.get("tags", ())), expanded[line]) for line, table in zip(lines, tables, strict=True)]


def _write(root: Path, merged: Merged, functions: Mapping[Any, str]) -> None:
    """Write the functions before the entries that use them, so that the workspace is valid at any time; extend .gitignore in a new one."""
    for path, ir in functions.items():
        if not (root / path).exists():
            write_whole(root / path, ir, durable=False)
    content = merged.text.encode()
    declare(root, content)
    if not (root / FILE).exists():
        ignore_results(root)
    if not (root / FILE).exists() or (root / FILE).read_bytes() != content:
        write_whole(root / FILE, merged.text, durable=False)


def extracted_text(found: Mapping[str, Any]) -> str:
    """Return the summary of an extraction as text."""
    shown = {"new": "new", "known": "known", "changed": "changed", "gone": "unused"}
    lines = [f"  {shown[what]:<9}{name}" for what in ("new", "changed", "gone") for name in found[what]]
    lines += [f"  left out {each['name']}: {each['reason']}" for each in found["left_out"]]
    lines += [_in_parts(each) for each in found["in_parts"]]
    counts = ", ".join(f"{len(found[what])} {shown[what]}" for what in ("new", "known", "gone"))
    headline = f"{os.path.relpath(found['file'])}: {counts}, {len(found['left_out'])} left out"
    shares = [share_text(each, "fit no template but the fallback") for each in found["fallbacks"]]
    return "\n".join([headline, *lines, str(Coverage(**found["coverage"])), *shares])
