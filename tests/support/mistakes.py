"""Owns the list of mistakes that people make by hand, each with what it must be answered: the place and the way out.

Knows nothing of how they are found. Mistakes of calls and of what needs TVM are in `tests/tvm/test_mistakes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from support.spaces import FAKES

BASE = {
    **FAKES,
    "workloads.toml": """\
edition = 1

[artifact]
name = "mine"
version = "1.0"

[target.host]
arch = "host"

[target.h200]
arch = "h200"

[defaults]
targets = ["host"]

[[workload]]
name = "projection"
rule = "matmul"
m = [16, 128]
n = 256
k = 256
layout = "nt"
dtype = "float32"
epilogue = ["bias", "relu"]
top_k = 8

[[workload]]
name = "conv"
rule = "conv2d"
n = 1
h = 14
w = 14
c = 64
f = 64
kh = 3
kw = 3
padding = 1
dtype = "float32"

[[workload]]
name = "norm"
rule = "softmax"
shape = [16, 64]
""",
}


class Mistake(NamedTuple):
    """A mistake in a workspace that is otherwise right."""

    what: str
    old: str
    """Text of workloads.toml, or of `file`, that stands in place of `new`; empty: `new` is added at the end."""
    new: str
    says: tuple[str, ...]
    """What one line of the answer holds: the place first, then what is the case, then the way out."""
    file: str = "workloads.toml"
    command: tuple[str, ...] = ("check",)
    code: int = 2


def _in(line: int, *says: str, entry: str = "") -> tuple[str, ...]:
    return (f"workloads.toml:{line}: {entry}{': ' * bool(entry)}", *says)


PROJECTION = '[[workload]]\nname = "projection"'
