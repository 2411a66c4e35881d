"""A mask that compares positions says lengths, of every sequence and whatever positions are; other masks stay masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from support.thinned import at
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.places import noted_of, rule_of
from kerneldecl.compiler.model_import.read_model import called, fused

B, H, K, D = 3, 2, 7, 8
NUMBERS = np.arange(K)
Emit = Callable[[Any], Any]


def const(value: Any, dtype: str = "int64") -> Any:
    return relax.const(np.asarray(value, dtype), dtype)


def attention(seen: Callable[[Emit, Any], Any], *, hides: bool = False, low: float = -np.inf) -> Callable[..., Any]:
    """Return what builds attention of which a condition of positions says the mask."""

    def build(emit: Emit, q: Any, k: Any, v: Any, position: Any) -> Any:
        condition = seen(emit, position)
        scores = emit(op.matmul(q, emit(op.permute_dims(k, (0, 1, 3, 2)))))
        scores = emit(op.where(condition, *((const(low, "float32"), scores) if hides else (scores, const(low, "float32")))))
        weights = emit(op.nn.softmax(scores))
        if low == -np.inf:
            weights = emit(op.where(emit(op.isnan(weights)), const(0.0, "float32"), weights))
        return emit(op.matmul(weights, v))

    return build


def of_sequences(emit: Emit, position: Any) -> Any:
    return emit(op.reshape(position, (B, 1, 1, 1)))


def following(emit: Emit, position: Any) -> Any:
    return emit(op.reshape(emit(op.add(const([0, 1, 2]), emit(op.reshape(position, (B, 1))))), (B, 1, 3, 1)))


def compared(operator: Any, placed: Callable[[Emit, Any], Any] = of_sequences, numbers: Any = NUMBERS) -> Callable[[Emit, Any], Any]:
    return lambda emit, position: emit(operator(const(numbers), placed(emit, position)))


def exchanged(operator: Any) -> Callable[[Emit, Any], Any]:
    return lambda emit, position: emit(operator(of_sequences(emit, position), const(NUMBERS)))


LENGTHS: dict[str, tuple[Callable[..., Any], int]] = {
    "up to its own": (attention(compared(op.less_equal)), 1),
    "before": (attention(compared(op.less)), 1),
    "own on the left": (attention(exchanged(op.greater_equal)), 1),
    "later ones hidden": (attention(compared(op.greater), hides=True), 1),
    "three that follow": (attention(compared(op.less_equal, following)), 3),
}
MASKS: dict[str, tuple[Callable[..., Any], int, str]] = {
    "later ones seen": (attention(compared(op.greater)), 1, "numbers of keys with a position for each query"),
    "other numbers": (attention(compared(op.less, numbers=NUMBERS[::-1])), 1, "numbers of keys with a position for each query"),
    "equal": (attention(compared(op.equal)), 1, "does not compare positions"),
    "the least number": (attention(compared(op.less_equal), low=-1e30), 1, "a row that sees no key is not 0 in the model"),
    "queries at one position": (attention(compared(op.less_equal)), 3, "not known to follow each other"),
}


def module() -> tvm.IRModule:
    builder = relax.BlockBuilder()
    for name, (build, queries, *_) in (LENGTHS | MASKS).items():
        params = [relax.Var(each, relax.TensorType((B, H, rows, D), "float32")) for each, rows in zip("qkv", (queries, K, K), strict=True)]
        params.append(relax.Var("position", relax.TensorType((B,), "int64")))
        with builder.function(name.replace(" ", "_"), params):
            with builder.dataflow():
                found = builder.emit_output(build(builder.emit, *params))
            builder.emit_func_output(found)
    return builder.get()


@pytest.fixture(scope="module")
def found() -> tuple[tvm.IRModule, Any, Any]:
    """Return attentions as rules, and both forms as TVM compiles them."""
    mod = fused(module(), fuses=lambda _: True)
    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
    machines = [relax.VirtualMachine(relax.build(each, target), tvm.cpu()) for each in (module(), mod)]
    return mod, machines[0], machines[1]


def rules_of(mod: tvm.IRModule, name: str) -> list[str]:
    kept = {var.name_hint: mod[var] for var in mod.functions if var.name_hint == name or isinstance(mod[var], tvm.tirx.PrimFunc)}
    rules = (rule_of(func) for _, func, _ in called(tvm.IRModule(kept)))
    return [rule[0] for rule in rules if rule is not None and rule[0].startswith("attention")]


@pytest.mark.parametrize("position", at({0, 3}, [(each,) for each in [(0, 3, 6), (5, -1, 2), (-9, 1, 8), (6, 6, 1000)]]))
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_are_those_of_the_mask(found: Any, name: str, position: tuple[int, ...]) -> None:
    mod, exact, machine = found
    function, queries = name.replace(" ", "_"), LENGTHS[name][1]
    assert rules_of(mod, function) == ["attention_decode"]
    if queries > 1 and max(position) + queries > K:
        position = tuple(min(each, K - queries) for each in position)  # beyond the cache there is no row
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((B, H, rows, D)).astype("float32") for rows in (queries, K, K)]
    inputs = [tvm.runtime.tensor(each) for each in (*arrays, np.array(position, "int64"))]
    np.testing.assert_allclose(machine[function](*inputs).numpy(), exact[function](*inputs).numpy(), atol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_other_masks_stay_masks_for_a_reason(name: str) -> None:
    mod = fused(tvm.IRModule({"main": module()[name.replace(" ", "_")]}), fuses=lambda _: True)
    assert rules_of(mod, "main") == ["attention"]
    (noted,) = noted_of(mod)
    assert noted.endswith(MASKS[name][2])
    assert "rule attention, not attention_decode: " in noted
