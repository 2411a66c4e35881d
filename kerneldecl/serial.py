"""Owns the trip of model values through JSON: between processes and into records.

Knows nothing of who sends them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kerneldecl.model import Access, Arch, Arg, Axis, Block, Cpu, Gpu, IterSpace, Signature, frozen


def to_json(value: Any) -> Any:
    """Return a frozen value as JSON: dataclasses become objects, tuples lists."""
    return dataclasses.asdict(value)


def signature_from_json(json: Mapping[str, Any]) -> Signature:
    return Signature(*(tuple(Arg(a["name"], tuple(a["shape"]), a["dtype"]) for a in json[side]) for side in ("inputs", "outputs")))


def arch_from_json(json: Mapping[str, Any]) -> Arch:
    target = tuple((name, frozen(value)) for name, value in json["tvm_target"])
    cpu = Cpu(**json["cpu"]) if json["cpu"] else None
    # The tuples among a GPU's figures have become lists on the way.
    figures: dict[str, Any] = {name: frozen(value) for name, value in (json["gpu"] or {}).items()}
    return Arch(**{**json, "tvm_target": target, "cpu": cpu, "gpu": Gpu(**figures) if figures else None})


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
    )


def _access(json: Mapping[str, Any]) -> Access:
    index = tuple(None if terms is None else tuple((axis, coefficient) for axis, coefficient in terms) for terms in json["index"])
    return Access(json["operand"], tuple(json["shape"]), json["dtype"], index)
