"""Owns the conversion of model values to JSON and back, for messages between processes and for records.

Knows nothing of who sends or keeps them.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kerneldecl.model import Access, Arch, Axis, Block, Candidate, Cpu, Gpu, IterSpace, Trial, frozen
from kerneldecl.signature import Arg, Signature
from kerneldecl.timing import Timings


def to_json(value: Any) -> Any:
    """Return a frozen value as JSON: dataclasses become objects, tuples lists."""
    return dataclasses.asdict(value)


@functools.lru_cache(maxsize=64)
def arch_to_json(arch: Arch) -> Any:
    """Return an arch as JSON, the same object for each request that names it: nobody changes it."""
    return to_json(arch)


def signature_from_json(json: Mapping[str, Any]) -> Signature:
    inputs, outputs = (tuple(Arg(a["name"], tuple(a["shape"]), a["dtype"]) for a in json[side]) for side in ("inputs", "outputs"))
    return Signature(inputs, outputs, json.get("updated", 0))


def signature_to_json(signature: Signature) -> dict[str, Any]:
    """Return a signature as JSON; most update nothing, and say nothing of it."""
    fields: dict[str, Any] = to_json(signature)
    return fields if signature.updated else {name: value for name, value in fields.items() if name != "updated"}


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


_PLAIN = frozenset({str, int, bool, type(None)})
"""Types whose values have no other type; an int does for a float."""
_OF_TRIAL = tuple(field.name for field in dataclasses.fields(Trial))
"""All but candidate and timings are numbers, texts and tuples of numbers: nothing in them has to be converted."""
_ONLY_WHERE_TRUE = ("registers", "smem_bytes", "spill_bytes", "is_traceless")


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """Return what a record keeps of a trial: fields that say nothing are left out."""
    predicted = float(f"{trial.predicted_secs:.4g}")
    fields = {
        **{name: getattr(trial, name) for name in _OF_TRIAL},
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
    return "" if _judge(hint)(value) else _place(value, hint, where)


def _place(value: object, hint: Any, where: str) -> str:
    """Return the first place of a value that does not fit."""
    parts: Iterable[tuple[object, Any, str]] = ()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, hint):
        parts = ((getattr(value, name), of, f"{where}.{name}") for name, of in _hints(hint).items())
    elif get_origin(hint) is tuple and isinstance(value, tuple):
        args = get_args(hint)
        hints = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        parts = ((item, of, f"{where}[{at}]") for at, (item, of) in enumerate(zip(value, hints, strict=False)))
    return next((_place(item, of, place) for item, of, place in parts if not _judge(of)(item)), where)


@functools.cache
def _judge(hint: Any) -> Callable[[Any], bool]:
    """Return a function that says whether a value is of an annotated type.

    It is made once for a type: a plan's records hold hundreds of thousands of samples, and nearly all fit.
    """
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _judge_of_dataclass(hint)
    if origin is tuple:
        return _judge_of_tuples(args)
    if origin in {Union, types.UnionType}:
        plain = frozenset(member for member in args if member in _PLAIN)
        others = tuple(_judge(member) for member in args if member not in plain)
        return lambda value: type(value) in plain or any(judge(value) for judge in others)
    if origin is Literal:
        return lambda value: value in args
    allowed = {int, float} if hint is float else {hint}
    return (lambda value: type(value) in allowed) if isinstance(hint, type) else lambda _: True


def _judge_of_dataclass(cls: type) -> Callable[[Any], bool]:
    """Return a function that says whether a value is of a dataclass and its fields are of theirs.

    Fields whose types alone decide are judged at once: of all records' values, these types come in few combinations.
    """
    hints = _hints(cls)
    plain = [name for name, of in hints.items() if _is_decided_by_type(of)]
    others = [(attrgetter(name), _judge(of)) for name, of in hints.items() if name not in plain]
    plain_of = attrgetter(*plain, "__class__", "__class__")  # a tuple for any number of fields
    judges = [_judge(hints[name]) for name in plain]
    known: set[tuple[type, ...]] = set()

    def judge(value: Any) -> bool:
        if not isinstance(value, cls):
            return False
        found = plain_of(value)
        if (combination := tuple(map(type, found))) not in known:
            if not all(fits(each) for fits, each in zip(judges, found, strict=False)):
                return False
            known.add(combination)
        for field, fits in others:  # noqa: SIM110  a generator for each value takes longer than its judges
            if not fits(field(value)):
                return False
        return True

    return judge


def _is_decided_by_type(hint: Any) -> bool:
    """Say whether `_judge` looks at nothing but the type of a value."""
    if get_origin(hint) in {Union, types.UnionType}:
        return all(map(_is_decided_by_type, get_args(hint)))
    return hint in _PLAIN or hint is float


def _judge_of_tuples(args: tuple[Any, ...]) -> Callable[[Any], bool]:
    if args[1:] != (Ellipsis,):
        judges = tuple(map(_judge, args))
        if len(judges) == 2:
            first, second = judges
            return lambda value: isinstance(value, tuple) and len(value) == 2 and first(value[0]) and second(value[1])
        return lambda value: (
            isinstance(value, tuple) and len(value) == len(judges) and all(judge(item) for judge, item in zip(judges, value, strict=True))
        )
    if args[0] in _PLAIN:
        return lambda value: isinstance(value, tuple) and {*map(type, value)} <= {args[0]}
    if args[0] is float:
        return lambda value: isinstance(value, tuple) and {*map(type, value)} <= {int, float}
    item_judge = _judge(args[0])
    return lambda value: isinstance(value, tuple) and all(map(item_judge, value))


@functools.cache
def _hints(cls: Any) -> Mapping[str, Any]:
    return get_type_hints(cls)
