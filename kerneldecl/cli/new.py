"""Owns the command that starts a plug-in: a small file that works, and its test.

Knows nothing of how plug-ins are found or loaded.
"""

from __future__ import annotations

import re

import click

from kerneldecl.cli.options import Settings
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.plugins.find import SINGULAR, Kind, plugin_names
from kerneldecl.store.files import write_whole

_NAME = re.compile(r"[a-z][a-z0-9_]*")

_RULE = '''\
"""Owns {words}: Y = a * X + Z, element by element, until you write what it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature


@dataclass(frozen=True, kw_only=True)
class {class_name}(Rule):
    """Y = a * X + Z, element by element."""

    shape: tuple[Extent, ...]
    """Extents of X, Z and Y."""
    a: float = 2.0
    """The factor of X."""
    dtype: FloatDtype = "float32"
    """The dtype of all arguments."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each combination of attributes that makes no sense."""
        if not self.shape:
            yield "shape is empty; give at least one extent"

    def signature(self) -> Signature:
        x, z, y = (Arg(name, self.shape, self.dtype) for name in "XZY")
        return Signature((x, z), (y,))

    def lower(self) -> list[Any]:
        """Return what is computed, in TE: the inputs, then the outputs. Policies choose how."""
        from tvm import te

        x, z = inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]
        return [*inputs, te.compute(self.shape, lambda *i: te.const(self.a, self.dtype) * x(*i) + z(*i), name="Y")]

    def reference(self, *inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Compute the same in NumPy, more precisely: every candidate is compared with it."""
        x, z = (array.astype("float64") for array in inputs)
        return self.a * x + z

    def flops(self) -> int:
        return 2 * math.prod(self.shape)
'''

_RULE_TEST = '''\
"""Owns the test of rule {name}: candidates are verified against its reference, and the fastest is called."""

from pathlib import Path

import kerneldecl
import numpy as np

WORKLOADS = """
edition = 1
[artifact]
name = "test"
version = "1"
[target.host]
arch = "host"
[[workload]]
name = "{name}"
rule = "{name}"
shape = [[3, 5], [64, 128]]
top_k = 2
"""


def test_{name}_is_built_and_right(tmp_path: Path) -> None:
    (tmp_path / "workloads.toml").write_text(WORKLOADS)
    (tmp_path / "rules").symlink_to(Path(__file__).parents[1] / "rules")
    kernels = kerneldecl.build(tmp_path)["host"]
    for shape in ((3, 5), (64, 128)):
        x, z = (np.random.default_rng(seed).standard_normal(shape, np.float32) for seed in (0, 1))
        np.testing.assert_allclose(kernels.dispatch("{name}")(x, z), 2 * x + z, rtol=1e-5, atol=1e-6)
'''

_POLICY = '''\
"""Owns in which order {words} tries the register tiles of a GEMM on a CPU: large ones first, until you write what it is."""

from __future__ import annotations

from collections.abc import Sequence

from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies import cpu_matmul

TEMPLATES = cpu_matmul.TEMPLATES  # every template that a candidate may name
KINDS = ("cpu",)  # a line AUTO = {{"cpu": 5}} would have the policy auto ask it as well, before those with higher numbers


def propose(space: IterSpace, arch: Arch, top_k: int) -> Sequence[Proposal]:
    """Return at most `top_k` candidates, best first, each with its predicted seconds; nothing for what is no GEMM."""
    known = cpu_matmul.propose(space, arch, 100)
    return sorted(known, key=_tile, reverse=True)[:top_k]


def _tile(proposal: Proposal) -> int:
    params = dict(proposal.candidate.params)
    return int(params["tile_m"]) * int(params["tile_n"])
'''

_POLICY_TEST = '''\
"""Owns the test of policy {name}: what it proposes is built, verified and timed."""

import json
import subprocess
import sys
from pathlib import Path

import kerneldecl

WORKLOADS = """
edition = 1
[artifact]
name = "test"
version = "1"
[target.host]
arch = "host"
[[workload]]
name = "gemm"
rule = "matmul"
policy = "{name}"
m = 64
n = 64
k = 64
top_k = 3
"""


def test_{name}_proposes_large_tiles_first(tmp_path: Path) -> None:
    (tmp_path / "workloads.toml").write_text(WORKLOADS)
    (tmp_path / "policies").symlink_to(Path(__file__).parents[1] / "policies")
    kerneldecl.build(tmp_path)
    shown = subprocess.run([sys.executable, "-m", "kerneldecl", "show", "gemm", "--json"], cwd=tmp_path, capture_output=True, check=True)
    candidates = json.loads(shown.stdout)["candidates"]
    assert len(candidates) == 3
    assert all(each["samples"] for each in candidates), "each was built, verified and timed"
'''

_FILES: dict[str, tuple[Kind, str, str]] = {"rule": ("rules", _RULE, _RULE_TEST), "policy": ("policies", _POLICY, _POLICY_TEST)}


@click.command()
@click.argument("what", type=click.Choice(list(_FILES)))
@click.argument("name")
@click.pass_obj
def new(settings: Settings, what: str, name: str) -> None:
    """Start a rule or a policy of your own: a small file that works, and its test."""
    kind, text, test = _FILES[what]
    if problem := _problem(settings, kind, name):
        raise DeclarationError([problem])
    words = {"name": name, "words": name.replace("_", " "), "class_name": "".join(part[:1].upper() + part[1:] for part in name.split("_"))}
    for path, content in ((f"{kind}/{name}.py", text), (f"tests/test_{name}.py", test)):
        write_whole(settings.root / path, content.format(**words), durable=False)
        print(f"wrote {path}")
    print(f'next: python -m pytest tests/test_{name}.py, then declare an entry with {what} = "{name}"')


def _problem(settings: Settings, kind: Kind, name: str) -> Problem | None:
    place, noun = f"{kind}/{name}.py", SINGULAR[kind]
    if not _NAME.fullmatch(name):
        return Problem(place, f"{name!r} cannot be a {noun}'s name", "write small letters, digits and underscores, a letter first")
    if name in plugin_names(kind, settings.root):
        return Problem(place, f"there is a {noun} {name} already", f"choose another name; `kerneldecl {kind}` lists them")
    if (settings.root / f"tests/test_{name}.py").exists():
        return Problem(f"tests/test_{name}.py", "there is one already", "remove it first or choose another name")
    return None
