"""Owns the conversion of model values to JSON and back, for messages between processes and for records.

Knows nothing of who sends or keeps them.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kerneldecl.model import Access, Arch, Arg, Axis, Block, Candidate, Cpu, Gpu, IterSpace, Signature, Trial, frozen
from kerneldecl.timing import Timings


def to_json(value: Any) -> Any:
    """Return a frozen value as JSON: dataclasses become objects, tuples lists."""
    return dataclasses.asdict(value)


def signature_from_json(json: Mapping[str, Any]) -> Signature:
    return Signature(*(tuple(Arg(a["name"], tuple(a["shape"]), a["dtype"]) for a in json[side]) for side in ("inputs", "outputs")))


def arch_from_json(json: Mapping[str, Any]) -> Arch:
    target = tuple((name, frozen(value)) for name, value in json["tvm_target"])
    cpu = Cpu(**json["cpu"]) if json["cpu"] else None
    # Tuples among a GPU's figures have become lists in JSON.
    figures: dict[str, Any] = {name: frozen(value) for name, value in (json["gpu"] or {}).items()}
    tags = tuple(json.get("tvm_tags", ()))  # bundles of earlier versions have none
    return Arch(**{**json, "tvm_target": target, "tvm_tags": tags, "cpu": cpu, "gpu": Gpu(**figures) if figures else None})


def space_from_json(json: Mapping[str, Any]) -> IterSpace:
    return IterSpace(tuple(_block(b) for b in json["blocks"]), tuple(json["inputs"]), tuple(json["outputs"]))


def _block(json: Mapping[str, Any]) -> Block:
    reads, writes = (tuple(_access(a) for a in json[side]) for side in ("reads", "writes"))
    axes = tuple(Axis(**axis) for axis in json["axes"])
    return Block(
        name=json["name"],
        axes=axes,
        reads=reads,
        writes=writes,
        flops_per_point=json["flops_per_point"],
        is_multiply_accumulate=json["is_multiply_accumulate"],
        conditions=tuple((_terms(terms), constant) for terms, constant in json.get("conditions", ())),
    )


def _access(json: Mapping[str, Any]) -> Access:
    index = tuple(None if terms is None else _terms(terms) for terms in json["index"])
    return Access(json["operand"], tuple(json["shape"]), json["dtype"], index)


def _terms(json: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((axis, coefficient) for axis, coefficient in json)


_ONLY_WHERE_TRUE = ("registers", "smem_bytes", "spill_bytes", "is_traceless")


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """Return what a record keeps of a trial: fields that say nothing are left out."""
    predicted = float(f"{trial.predicted_secs:.4g}")
    fields = {
        **to_json(trial),
        "candidate": trial.candidate.to_json(),
        "predicted_secs": predicted,
        "timings": timings_to_json(trial.timings),
    }
    return {name: value for name, value in fields.items() if value not in ("", (), {}, None) and (value or name not in _ONLY_WHERE_TRUE)}


def trial_from_json(json: Mapping[str, Any]) -> Trial:
    """Read what `trial_to_json` wrote."""
    read = {"candidate": Candidate.from_json(json["candidate"]), "samples": tuple(json.get("samples", ()))}
    return Trial(**{**json, **read, "timings": timings_from_json(json.get("timings", {}))})


def timings_to_json(timings: Timings) -> dict[str, list[float]]:
    return {protocol: list(samples) for protocol, samples in timings}


def timings_from_json(json: Mapping[str, Sequence[float]]) -> Timings:
    """Read what `timings_to_json` wrote."""
    return tuple((protocol, tuple(samples)) for protocol, samples in json.items())


def trials_from_json(json: Sequence[Mapping[str, Any]]) -> tuple[Trial, ...]:
    return tuple(map(trial_from_json, json))


def misfit(value: object, hint: Any, where: str) -> str:
    """Return the first place below `where` that is not of its annotated type; empty where all are.

    What is read from files of others is checked so: dataclasses take whatever they are given.
    """
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, hint):
            return where
        return next(filter(None, (misfit(getattr(value, name), of, f"{where}.{name}") for name, of in _hints(hint).items())), "")
    if get_origin(hint) is tuple:
        return _misfit_in_tuple(value, get_args(hint), where)
    return "" if _fits(value, hint, where) else where


def _fits(value: object, hint: Any, where: str) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return any(not misfit(value, member, where) for member in args)
    if origin is Literal:
        return value in args
    allowed = {int, float} if hint is float else {hint}
    return not isinstance(hint, type) or type(value) in allowed


def _misfit_in_tuple(value: object, args: tuple[Any, ...], where: str) -> str:
    if not isinstance(value, tuple):
        return where
    hints = (args[0],) * len(value) if len(args) == 2 and args[1] is Ellipsis else args
    if len(hints) != len(value):
        return where
    return next(filter(None, (misfit(item, hint, f"{where}[{at}]") for at, (item, hint) in enumerate(zip(value, hints, strict=True)))), "")


@functools.cache
def _hints(cls: Any) -> Mapping[str, Any]:
    return get_type_hints(cls)
