"""Attention as models write it becomes one function of rule attention, which computes the same; what is left apart has a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from support.graphs import TARGET
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.dynamic_shapes import callees
from kerneldecl.compiler.graph.attention_masks import known_mask
from kerneldecl.compiler.graph.places import module_of, refused_of, rule_of
from kerneldecl.compiler.model_import.read_model import called, fused

B, H, S, D = 2, 4, 6, 8
ROWS, HEADS, KEPT = (B, S, H * D), (B, H, S, D), (B, 2, S, D)
Emit = Callable[[Any], Any]
INF, LEAST = float("-inf"), float(np.finfo("float32").min)
LOWER = np.tril(np.ones((S, S), "bool"))


def const(value: Any, dtype: str = "float32") -> Any:
    return relax.const(np.asarray(value, dtype), dtype)


def heads_of(emit: Emit, x: Any) -> Any:
    """Return rows as a projection writes them by heads."""
    return emit(op.permute_dims(emit(op.reshape(x, (B, -1, H, D))), (0, 2, 1, 3)))


def scores_of(emit: Emit, q: Any, k: Any) -> Any:
    return emit(op.matmul(q, emit(op.permute_dims(k, (*range(len(k.ty.shape) - 2), -1, -2)))))


def scaled(emit: Emit, q: Any, k: Any) -> Any:
    return emit(op.multiply(scores_of(emit, q, k), const(D**-0.5)))


def softmax_of(emit: Emit, scores: Any, v: Any) -> Any:
    return emit(op.matmul(emit(op.nn.softmax(scores)), v))


def by_rows(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    context = softmax_of(emit, scaled(emit, *(heads_of(emit, each) for each in (q, k))), heads_of(emit, v))
    return emit(op.reshape(emit(op.permute_dims(context, (0, 2, 1, 3))), ROWS))


def both_scaled(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    root = const(D**-0.25)
    return softmax_of(emit, scores_of(emit, emit(op.multiply(q, root)), emit(op.multiply(k, root))), v)


def queries_divided(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    return softmax_of(emit, scores_of(emit, emit(op.divide(q, const(3.0))), k), v)


def kept_where(mask: Any, low: float) -> Callable[..., Any]:
    def build(emit: Emit, q: Any, k: Any, v: Any) -> Any:
        return softmax_of(emit, emit(op.where(const(mask, "bool"), scaled(emit, q, k), const(low))), v)

    return build


def hidden_where(mask: Any) -> Callable[..., Any]:
    def build(emit: Emit, q: Any, k: Any, v: Any) -> Any:
        return softmax_of(emit, emit(op.where(const(mask, "bool"), const(INF), scaled(emit, q, k))), v)

    return build


def added(mask: Any) -> Callable[..., Any]:
    def build(emit: Emit, q: Any, k: Any, v: Any) -> Any:
        return softmax_of(emit, emit(op.add(scaled(emit, q, k), const(mask))), v)

    return build


def added_argument(emit: Emit, q: Any, k: Any, v: Any, mask: Any) -> Any:
    return softmax_of(emit, emit(op.add(scaled(emit, q, k), mask)), v)


def keys_seen(emit: Emit, q: Any, k: Any, v: Any, mask: Any) -> Any:
    seen = emit(op.astype(emit(op.reshape(mask, (B, 1, 1, S))), "bool"))
    return softmax_of(emit, emit(op.where(seen, scaled(emit, q, k), const(INF))), v)


def keys_seen_by_numbers(emit: Emit, q: Any, k: Any, v: Any, mask: Any) -> Any:
    seen = emit(op.logical_and(const(LOWER[None, None], "bool"), emit(op.astype(emit(op.reshape(mask, (B, 1, 1, S))), "bool"))))
    return softmax_of(emit, emit(op.add(scaled(emit, q, k), emit(op.where(seen, const(0.0), const(INF))))), v)


def grouped(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    spread = (emit(op.broadcast_to(emit(op.expand_dims(each, 2)), (B, 2, 2, S, D))) for each in (k, v))
    k, v = (emit(op.reshape(each, HEADS)) for each in spread)
    return softmax_of(emit, emit(op.add(scaled(emit, q, k), const(np.where(LOWER, 0, LEAST)))), v)


def repeated(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    k, v = (emit(op.repeat(each, 2, 1)) for each in (k, v))
    return softmax_of(emit, scaled(emit, q, k), v)


def half_with_casts(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    q, k, v = (emit(op.astype(each, "float16")) for each in (q, k, v))
    scores = emit(op.multiply(scores_of(emit, q, k), const(D**-0.5, "float16")))
    weights = emit(op.astype(emit(op.nn.softmax(emit(op.astype(scores, "float32")))), "float16"))
    return emit(op.matmul(weights, v))


def capped(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    capped = emit(op.multiply(emit(op.tanh(emit(op.divide(scaled(emit, q, k), const(5.0))))), const(5.0)))
    return softmax_of(emit, emit(op.where(const(LOWER, "bool"), capped, const(INF))), v)


def guarded(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    seen = LOWER.copy()
    seen[2] = False
    weights = emit(op.nn.softmax(emit(op.where(const(seen, "bool"), scaled(emit, q, k), const(INF)))))
    return emit(op.matmul(emit(op.where(emit(op.isnan(weights)), const(0.0), weights)), v))


def relax_operator(emit: Emit, q: Any, k: Any, v: Any, bias: Any) -> Any:
    return emit(op.nn.attention(q, k, v, bias, scale=0.5, causal_mask="BottomRight"))


def read_by_a_linear(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    context = softmax_of(emit, scaled(emit, q, k), v)
    rows = emit(op.reshape(emit(op.permute_dims(context, (0, 2, 1, 3))), (B, H * D)))
    return emit(op.matmul(rows, const(np.ones((H * D, 3)))))


def one_batch_axis(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    return softmax_of(emit, scaled(emit, q, k), v)


Q3, BIAS = (B, H, 3, D), np.random.default_rng(0).standard_normal((1, H, S, S))
COLUMN, ROW = np.arange(S), np.arange(S)[:, None]
CAUSAL, MASK = {"causal": True}, {"mask": True}
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], dict[str, Any]]] = {
    "by_rows": (by_rows, [ROWS] * 3, {"layout": "bshd"}),
    "both_scaled": (both_scaled, [HEADS] * 3, {}),
    "queries_divided": (queries_divided, [HEADS] * 3, {"scale": pytest.approx(1 / 3)}),
    "tril": (kept_where(LOWER, INF), [HEADS] * 3, CAUSAL),
    "hidden": (hidden_where(~LOWER), [HEADS] * 3, CAUSAL),
    "least_number": (added(np.where(LOWER, 0, LEAST)), [HEADS] * 3, CAUSAL),
    "from_the_last": (added(np.where(LOWER[3:], 0, INF)), [Q3, HEADS, HEADS], {"queries": 3, "keys": S, **CAUSAL}),
    "from_the_first": (added(np.where(LOWER[:3], 0, INF)), [Q3, HEADS, HEADS], {"queries": 3, "keys": S, "align": "start", **CAUSAL}),
    "window": (kept_where(LOWER & (COLUMN >= ROW - 2), LEAST), [HEADS] * 3, {"window": 2, **CAUSAL}),
    "all_seen": (kept_where(np.ones((S, S)), INF), [HEADS] * 3, {}),
    "nothing_added": (added(np.zeros((1, 1, S, S))), [HEADS] * 3, {}),
    "heads": (added(BIAS), [HEADS] * 3, {"mask_axes": "hqk", **MASK}),
    "heads_causal": (added(np.where(LOWER, BIAS, INF)), [HEADS] * 3, {"mask_axes": "hqk", **CAUSAL, **MASK}),
    "one_matrix": (added(np.broadcast_to(BIAS[:, :1], (B, H, S, S))), [HEADS] * 3, MASK),
    "bias_argument": (added_argument, [*[HEADS] * 3, (B, 1, S, S)], {"mask_axes": "bqk", **MASK}),
    "keys_seen": (keys_seen, [*[HEADS] * 3, (B, S)], {"mask_axes": "bk", "mask_dtype": "bool", **MASK}),
    "keys_numbers": (keys_seen_by_numbers, [*[HEADS] * 3, (B, S)], {"mask_axes": "bk", "mask_dtype": "bool", **CAUSAL, **MASK}),
    "grouped": (grouped, [HEADS, KEPT, KEPT], {"kv_heads": 2, **CAUSAL}),
    "repeated": (repeated, [HEADS, KEPT, KEPT], {"kv_heads": 2}),
    "half": (half_with_casts, [HEADS] * 3, {}),
    "capped": (capped, [HEADS] * 3, {"softcap": pytest.approx(5.0), **CAUSAL}),
    "guarded": (guarded, [HEADS] * 3, MASK),
    "relax_operator": (
        relax_operator,
        [(B, S, H, D)] * 3 + [(B, H, S, S)],
        {"mask_axes": "bhqk", "layout": "bshd", "scale": 0.5, **CAUSAL, **MASK},
    ),
    "read_by_a_linear": (read_by_a_linear, [(B, H, 1, D), HEADS, HEADS], {"queries": 1, "keys": S}),
    "one_batch_axis": (one_batch_axis, [(8, S, D)] * 3, {}),
}


def module(builds: dict[str, tuple[Callable[..., Any], list[Any]]], dtype: str = "float32") -> tvm.IRModule:
    """Return a module with a function of arrays of these shapes for each."""
    builder = relax.BlockBuilder()
    for name, (build, shapes) in builds.items():
        params = [relax.Var(f"x{at}", relax.TensorType(shape, dtype)) for at, shape in enumerate(shapes)]
        with builder.function(name, params):
            with builder.dataflow():
                found = builder.emit_output(build(builder.emit, *params))
            builder.emit_func_output(found)
    return builder.get()


def attentions(mod: tvm.IRModule) -> list[dict[str, Any]]:
    rules = [rule_of(func) for _, func, _ in called(mod)]
    return [dict(found[1]) for found in rules if found is not None and found[0] == "attention"]


@pytest.fixture(scope="module")
def cases() -> tvm.IRModule:
    return module({name: (build, shapes) for name, (build, shapes, _) in CASES.items()})


@pytest.fixture(scope="module")
def one_function(cases: tvm.IRModule) -> tvm.IRModule:
    """Return the cases with attention as one function."""
    return fused(cases, TARGET, fuses=lambda _: True)


@pytest.fixture(scope="module")
def machines(cases: tvm.IRModule, one_function: tvm.IRModule) -> tuple[Any, Any]:
    """Return the cases as TVM compiles them, and with attention as one function; unoptimised, as compiling is what takes long."""
    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
    found = [relax.VirtualMachine(relax.build(mod, target), tvm.cpu()) for mod in (cases, one_function)]
    return found[0], found[1]


def test_nothing_is_left_apart(one_function: tvm.IRModule) -> None:
    assert not refused_of(one_function)


@pytest.mark.parametrize("name", CASES)
def test_attention_is_one_function(one_function: tvm.IRModule, machines: tuple[Any, Any], name: str) -> None:
    _, shapes, wanted = CASES[name]
    rules = [rule_of(one_function[callee]) for callee in callees(one_function[name])]
    (attrs,) = (found[1] for found in rules if found is not None and found[0] == "attention")
    others = {"softcap", "scale", "mask", "mask_axes", "mask_dtype", "causal", "align", "window"} - wanted.keys()
    assert {key: attrs.get(key) for key in wanted} == wanted
    assert not others & attrs.keys()
    rng = np.random.default_rng(1)
    inputs = [tvm.runtime.tensor(rng.standard_normal(shape).astype("float32")) for shape in shapes]
    if "keys" in name:
        inputs[3] = tvm.runtime.tensor(np.array([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1]], "float32"))
    exact, found = (machine[name](*inputs).numpy().astype("float32") for machine in machines)
    np.testing.assert_allclose(found, exact, atol=4e-3 if name == "half" else 1e-5)


def scores_returned(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    weights = emit(op.nn.softmax(scaled(emit, q, k)))
    return relax.Tuple([emit(op.matmul(weights, v)), weights])


def scaled_by_a_tensor(emit: Emit, q: Any, k: Any, v: Any, by: Any) -> Any:
    return softmax_of(emit, emit(op.multiply(scaled(emit, q, k), by)), v)


def two_masks(emit: Emit, q: Any, k: Any, v: Any, first: Any, second: Any) -> Any:
    return softmax_of(emit, emit(op.add(emit(op.add(scaled(emit, q, k), first)), second)), v)


def masked_then_capped(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    masked = emit(op.where(const(LOWER, "bool"), scaled(emit, q, k), const(INF)))
    return softmax_of(emit, emit(op.multiply(emit(op.tanh(emit(op.divide(masked, const(5.0))))), const(5.0))), v)


def clipped(emit: Emit, q: Any, k: Any, v: Any) -> Any:
    return softmax_of(emit, emit(op.exp(scaled(emit, q, k))), v)


ROW_MASKS = [HEADS] * 3 + [(B, 1, S, S)]
REFUSED: dict[str, tuple[Callable[..., Any], list[Any], str]] = {
    "scores returned": (scores_returned, [HEADS] * 3, "scores are used elsewhere, too"),
    "a tensor as scale": (scaled_by_a_tensor, ROW_MASKS, "scores are scaled by more than a number"),
    "two masks": (two_masks, [*ROW_MASKS, (1, H, S, S)], "it has several masks that are neither causal nor a window"),
    "mask before softcap": (masked_then_capped, [HEADS] * 3, "its mask is applied before its softcap"),
    "another operator": (clipped, [HEADS] * 3, "scores pass through exp"),
    "negative scale": (lambda emit, q, k, v: softmax_of(emit, emit(op.multiply(scores_of(emit, q, k), const(-1.0))), v), [HEADS] * 3,
                       "scale -1.0 is negative; write a finite one above 0"),
    "dynamic": (one_batch_axis, [(8, tvm.tirx.Var("n", "int64"), D)] * 3, "a size is known at run time only; `--dim` declares sizes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_apart_has_a_reason(case: str) -> None:
    build, shapes, sentence = REFUSED[case]
    mod = fused(module({"main": (build, shapes)}), TARGET, fuses=lambda _: True)
    assert refused_of(mod) == [f"attention: {sentence}"]
    assert not attentions(mod)


def test_without_a_fused_kernel_the_graph_stays_as_it_is(cases: tvm.IRModule) -> None:
    mod = tvm.IRModule({"main": cases["by_rows"].with_attr("global_symbol", "main")})
    apart = fused(mod, TARGET)
    assert [found[0] for _, func, _ in called(apart) if (found := rule_of(func))] == ["matmul", "softmax", "matmul"]
    assert refused_of(apart) == ["attention: there is no fused kernel for it"]


@pytest.mark.parametrize("keys", [4, 6, 9])
@pytest.mark.parametrize("offset", [-2, 0, 3])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_bands_are_exactly_those_of_the_rule(keys: int, offset: int, window: int) -> None:
    """What is called causal hides just what the rule hides, for any diagonal; other bands stay masks."""
    row, column = np.ogrid[:S, :keys]
    own = row + offset
    hidden = (column > own) | ((column < own - window) & bool(window))
    mask = known_mask(np.where(hidden, -np.inf, 0.0).astype("float32")[None, None])
    if mask.added is not None:
        assert not mask.is_causal
        np.testing.assert_array_equal(mask.added[0, 0] == -np.inf, hidden)
        return
    start = row + (keys - S if mask.align == "end" else 0)
    behind = column > start if mask.is_causal else np.zeros((S, keys), "bool")
    before = column < start - mask.window if mask.window else np.zeros((S, keys), "bool")
    np.testing.assert_array_equal(behind | before, hidden)


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        ("encoder.layer.3.attention.self", "encoder.layer.3.attention"),
        ("layers.0.self_attn", "layers.0.self_attn.attention"),
        ("decoder.block.0.layer.1.EncDecAttention", "decoder.block.0.layer.1.EncDecAttention.attention"),
        ("blocks.1", "blocks.1.attention"),
        ("", "attention"),
    ],
)
def test_it_is_named_after_its_module(scope: str, name: str) -> None:
    assert module_of(scope, "attention") == name
