"""Convolutions of any rank, scans, sorted rows, lookups and movers without TVM: references beside plain loops, edges, mistakes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.repository import REPOSITORY

from kerneldecl.plugins.load import load_rule
from kerneldecl.rule import Rule

RNG = np.random.default_rng(5)


def rule(name: str, **attrs: Any) -> Rule:
    return load_rule(REPOSITORY, name)(**attrs)


def checked(name: str, **attrs: Any) -> Any:
    instance = rule(name, **attrs)
    assert list(instance.problems()) == []
    return instance


SIDES = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}
LAYOUTS = {1: ("nwc", "ncw"), 2: ("nhwc", "nchw"), 3: ("ndhwc", "ncdhw")}


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw a convolution of one, two or three sides, each with a stride, padding and dilation of its own."""
    count, groups = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    attrs: dict[str, Any] = {"n": draw(st.integers(1, 2)), "c": groups * draw(st.integers(1, 2)), "f": groups * draw(st.integers(1, 2))}
    attrs |= {name: draw(st.integers(1, 6)) for name in SIDES[count]} | {f"k{name}": draw(st.integers(1, 3)) for name in SIDES[count]}
    attrs |= {name: tuple(draw(st.integers(1, 3)) for _ in range(count)) for name in ("strides", "dilations")}
    pads = tuple(draw(st.integers(0, 2)) for _ in range(2 * count))
    return f"conv{count}d", {**attrs, "pads": pads, "groups": groups, "layout": draw(st.sampled_from(LAYOUTS[count]))}


@given(convolutions())
def test_a_convolution_is_what_plain_loops_compute(drawn: tuple[str, dict[str, Any]]) -> None:
    name, attrs = drawn
    made = rule(name, **attrs)
    assume(not list(made.problems()))
    count, is_first = len(attrs["strides"]), attrs["layout"][1] == "c"
    x, w = made.inputs(np.random.default_rng(1))
    y = np.asarray(made.reference(x, w))
    assert y.shape == made.signature().outputs[0].shape
    x, y = (np.moveaxis(array, 1, -1) if is_first else array for array in (x, y))
    w = np.moveaxis(w, (0, 1), (-1, -2)) if is_first else w
    filters, channels = attrs["f"] // attrs["groups"], attrs["c"] // attrs["groups"]
    for image, *pixel, f in itertools.islice(np.ndindex(*y.shape), 0, None, 1 + y.size // 20):
        total = 0.0
        for *taps, c in np.ndindex(*w.shape[:-1]):
            places = zip(pixel, taps, attrs["strides"], attrs["dilations"], attrs["pads"], strict=False)
            at = [p * step + tap * apart - before for p, tap, step, apart, before in places]
            if all(0 <= place < side for place, side in zip(at, x.shape[1:], strict=False)):
                total += float(x[image, *at, f // filters * channels + c]) * float(w[*taps, c, f])
        assert math.isclose(y[image, *pixel, f], total, rel_tol=1e-5, abs_tol=1e-5)
    assert len(SIDES[count]) == y.ndim - 2


def test_one_side_is_a_convolution_of_images_of_one_row() -> None:
    attrs = {"n": 2, "w": 9, "c": 4, "f": 6, "kw": 3, "stride": 2, "groups": 2}
    line, image = checked("conv1d", pads=(2, 1), **attrs), checked("conv2d", h=1, kh=1, pads=(0, 2, 0, 1), **attrs)
    x, w = line.inputs(RNG)
    np.testing.assert_array_equal(line.reference(x, w), image.reference(x[:, None], w[None])[:, 0])
    assert line.flops() == image.flops()
    assert line.least_bytes() == image.least_bytes()


def test_both_layouts_add_the_bias_to_channels() -> None:
    attrs = {"n": 2, "h": 4, "w": 5, "c": 3, "f": 7, "kh": 2, "kw": 2, "epilogue": ("bias", "add", "relu")}
    last, first = checked("conv2d", **attrs), checked("conv2d", layout="nchw", **attrs)
    x, w, bias, residual = last.inputs(RNG)
    want = last.reference(x, w, bias, residual).transpose(0, 3, 1, 2)
    got = first.reference(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), bias, residual.transpose(0, 3, 1, 2))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert [arg.shape for arg in first.signature().inputs[2:]] == [(7,), (2, 7, 3, 4)]


TRANSPOSED = st.fixed_dictionaries(
    {name: st.integers(1, 4) for name in ("h", "kh", "kw")}
    | {"stride": st.integers(1, 3), "padding": st.integers(0, 2), "extra": st.integers(0, 2), "layout": st.sampled_from(["nhwc", "nchw"])}
)


@given(TRANSPOSED)
def test_a_transposed_convolution_adds_each_pixel_times_the_kernel(attrs: dict[str, Any]) -> None:
    stride, p = attrs["stride"], attrs["padding"]
    made = rule("conv2d_transpose", n=1, w=3, c=2, f=2, **attrs)
    assume(not list(made.problems()))
    x, w = made.inputs(np.random.default_rng(2))
    y = np.asarray(made.reference(x, w))
    assert y.shape == made.signature().outputs[0].shape
    x, w, y = (x, w, y) if attrs["layout"] == "nchw" else (x.transpose(0, 3, 1, 2), w.transpose(2, 3, 0, 1), y.transpose(0, 3, 1, 2))
    want = np.zeros(y.shape)
    for c, f, i, j, r, s in np.ndindex(2, 2, attrs["h"], 3, attrs["kh"], attrs["kw"]):
        row, column = i * stride + r - p, j * stride + s - p
        if 0 <= row < y.shape[2] and 0 <= column < y.shape[3]:
            want[0, f, row, column] += float(x[0, c, i, j]) * float(w[c, f, r, s])
    np.testing.assert_allclose(y, want, atol=1e-5)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=9), st.booleans(), st.booleans())
def test_a_cumulative_sum_is_a_running_total(row: list[int], exclusive: bool, reverse: bool) -> None:
    made = checked("cumsum", shape=(2, len(row)), exclusive=exclusive, reverse=reverse, dtype="int32")
    y = made.reference(np.array([row, row[::-1]], np.int32))
    order = row[::-1] if reverse else row
    totals = [0, *itertools.accumulate(order)]
    want = totals[:-1] if exclusive else totals[1:]
    assert y[0].tolist() == (want[::-1] if reverse else want)


SORTED = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, math.inf, -math.inf, math.nan]), min_size=1, max_size=12)


@given(SORTED, st.booleans(), st.data())
def test_equal_elements_keep_their_order_and_nan_is_the_largest(row: list[float], is_largest: bool, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(row)))
    values, indices = checked("topk", shape=(len(row),), k=k, largest=is_largest).reference(np.array(row, np.float32))

    def key(place: int) -> tuple[int, float, int]:
        x = row[place]
        rank, number = (1, 0.0) if math.isnan(x) else (0, x)
        return (-rank, -number, place) if is_largest else (rank, number, place)

    want = sorted(range(len(row)), key=key)[:k]
    assert indices.tolist() == want
    np.testing.assert_array_equal(values, [row[place] for place in want])


def test_a_sort_is_a_topk_of_all() -> None:
    x = RNG.integers(-128, 128, (3, 40)).astype(np.int8)
    for descending in (False, True):
        attrs = {"shape": (3, 40), "dtype": "int8", "index_dtype": "int32"}
        ordered = checked("sort", descending=descending, **attrs).reference(x)
        top = checked("topk", k=40, largest=descending, **attrs).reference(x)
        assert all((one == other).all() for one, other in zip(ordered, top, strict=True))
        assert (np.take_along_axis(x, ordered[1], -1) == ordered[0]).all()
    assert checked("sort", shape=(1,), dtype="int64").reference(np.array([np.iinfo(np.int64).min]))[0] == np.iinfo(np.int64).min


def test_rows_of_one_index_are_added_up() -> None:
    made = checked("scatter_add", rows=4, columns=2, updates=5)
    updates, base = np.arange(10.0).reshape(5, 2), np.ones((4, 2))
    y = made.reference(np.array([3, 0, 3, 3, 0]), updates, base)
    assert y.tolist() == [[11, 13], [1, 1], [1, 1], [11, 14]]
    assert checked("scatter_add", rows=4, columns=2, updates=5, base=False).reference(np.array([1] * 5), updates)[1].tolist() == [20, 25]
    indices, *_ = made.inputs(np.random.default_rng(1))
    assert {0, 3} <= set(indices.tolist()) < {0, 1, 2, 3}
    assert len(set(indices.tolist())) < 5, "some row gets several"
    assert made.is_repeatable()


def test_movers_are_what_numpy_does() -> None:
    x = RNG.standard_normal((3, 4, 5)).astype(np.float32)
    indices = np.array([[3, 0], [1, 1]])
    np.testing.assert_array_equal(checked("take", shape=x.shape, indices=(2, 2), axis=-2).reference(x, indices), x.take(indices, 1))
    other = x[:, :1] + 1
    np.testing.assert_array_equal(checked("concat", shapes=(x.shape, other.shape), axis=1).reference(x, other)[:, 4], other[:, 0])
    padded = checked("pad", shape=(3, 4, 5), pads=(1, 0, 0, 0, 2, 0), value=7.0).reference(x)
    assert padded.shape == (4, 6, 5)
    assert (padded[0] == 7).all()
    assert (padded[:, 4:] == 7).all()
    mask = np.array([1, 0, 2, 0, 0], np.uint8)
    np.testing.assert_array_equal(checked("where", shapes=((5,), x.shape, (1,))).reference(mask, x, np.zeros(1)), np.where(mask, x, 0))
    assert checked("cast", shape=(3,), dtype="float32", out_dtype="int8").reference(np.array([-1.7, 2.9, 0.5])).tolist() == [-1, 2, 0]


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["half_pixel", "asymmetric", "align_corners"]),
    st.sampled_from(["nearest", "bilinear"]),
)
def test_resizing_stays_inside_and_keeps_what_has_the_same_size(h: int, rows: int, where: str, op: str) -> None:
    made = checked("resize2d", op=op, n=1, h=h, w=4, c=2, rows=rows, columns=4, coordinates=where)
    x = RNG.standard_normal((1, h, 4, 2)).astype(np.float32)
    y = made.reference(x)
    assert y.shape == made.signature().outputs[0].shape
    low, high = x.min(1), x.max(1)
    assert (low[:, None] - 1e-6 <= y).all()
    assert (y <= high[:, None] + 1e-6).all()
    if h == rows:
        np.testing.assert_allclose(y, x, atol=1e-6)


ADAPTIVE = st.fixed_dictionaries(
    {name: st.integers(1, 9) for name in ("h", "w", "rows", "columns")} | {"op": st.sampled_from(["max", "mean"])}
)


@given(ADAPTIVE)
def test_adaptive_windows_cover_the_image(attrs: dict[str, Any]) -> None:
    made = rule("adaptive_pool2d", n=1, c=2, **attrs)
    assume(not list(made.problems()))
    (x,) = made.inputs(np.random.default_rng(1))
    y = np.asarray(made.reference(x))
    sides = ((attrs["h"], attrs["rows"]), (attrs["w"], attrs["columns"]))
    for row, column in np.ndindex(attrs["rows"], attrs["columns"]):
        at = [
            (math.floor(i * side / count), math.ceil((i + 1) * side / count)) for i, (side, count) in zip((row, column), sides, strict=True)
        ]
        window = x[0, slice(*at[0]), slice(*at[1]), 0].astype(np.float64)
        assert math.isclose(y[0, row, column, 0], window.max() if attrs["op"] == "max" else window.mean(), abs_tol=1e-9)


def test_resizing_a_ramp_bilinearly_gives_places() -> None:
    ramp = np.arange(4.0).reshape(1, 4, 1, 1)
    places = {
        "half_pixel": [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3],
        "align_corners": np.arange(8) * 3 / 7,
        "asymmetric": [0, 0.5, 1, 1.5, 2, 2.5, 3, 3],
    }
    for where, want in places.items():
        made = checked("resize2d", op="bilinear", n=1, h=4, w=1, c=1, rows=8, columns=1, coordinates=where)
        np.testing.assert_allclose(made.reference(ramp).reshape(-1), want, atol=1e-12)


IMAGE = {"n": 1, "h": 5, "w": 5, "c": 4, "f": 4, "kh": 3, "kw": 3}
MISTAKES = [
    (
        "conv1d",
        {"n": 1, "w": 4, "c": 2, "f": 2, "kw": 9},
        "the kernel spans 9 columns, but the padded image has 4; write a smaller kernel or more padding",
    ),
    ("conv3d", {"d": 1, "kd": 2, **IMAGE}, "the kernel spans 2 planes, but the padded image has 1; write a smaller kernel or more padding"),
    ("conv2d", {**IMAGE, "strides": (2,)}, "strides has 1 items; expected 2"),
    ("conv2d", {**IMAGE, "pads": (1, 1)}, "pads has 2 items; expected 4"),
    ("conv2d", {**IMAGE, "strides": (2, 1), "stride": 2}, "strides and stride are both given; strides says it for every side"),
    ("conv2d", {**IMAGE, "panel": 4, "layout": "nchw"}, "panel is for layout nhwc, "),
    ("conv2d", {**IMAGE, "groups": 3, "f": 6}, "groups 3 does not divide c 4; write a divisor"),
    ("conv2d_transpose", {**IMAGE, "extra": 1}, "extra 1 is not less than the stride, 1; write less"),
    ("conv2d_transpose", {**IMAGE, "padding": 3}, "padding 3 is not less than the kernel, 3 x 3: "),
    ("cumsum", {"shape": ()}, "shape has no extent; write shape = [16, 64], or other extents"),
    ("cumsum", {"shape": (3,), "axis": 1}, "axis 1 is out of range for a shape of 1 extents"),
    ("topk", {"shape": (3, 5), "k": 6}, "k 6 is more than a row's elements, 5; write fewer"),
    ("sort", {"shape": ()}, "shape has no extent; write shape = [16, 64], or other extents"),
    ("scatter_add", {"rows": 2**31 + 1, "columns": 1, "updates": 1, "index_dtype": "int32"}, "rows 2147483649 is more than int32 counts; "),
    ("take", {"shape": (3,), "indices": ()}, "indices has no extent; write indices = [512], or other extents"),
    ("take", {"shape": (3,), "indices": (2,), "axis": 1}, "axis 1 is out of range for a shape of 1 extents"),
    ("concat", {"shapes": ((2, 3),)}, "shapes has 1 items; 2 to 16 arrays are concatenated"),
    ("concat", {"shapes": ((2, 3), (2, 4))}, "shapes (2, 3), (2, 4) differ in more than axis 0; write equal extents, or another axis"),
    ("where", {"shapes": ((2,), (2,))}, "shapes has 2 items; expected 3, of the mask, X and Y"),
    ("where", {"shapes": ((2,), (3,), (1,))}, "shapes (2,), (3,), (1,) do not broadcast; write 1 or equal extents"),
    ("cast", {"shape": (2,), "dtype": "int8", "out_dtype": "int8"}, "dtype and out_dtype are both int8; "),
    ("pad", {"shape": (2, 3), "pads": (1, 1)}, "pads has 2 items; expected 4, one before and one after each axis"),
    ("pad", {"shape": (2,), "pads": (2, 0), "mode": "reflect"}, "pads reflect 2 elements of axis 0, which has 2; write 1 or fewer"),
    (
        "pad",
        {"shape": (2,), "pads": (1, 1), "value": 0.5, "dtype": "int8"},
        "value 0.5 is no whole number, which dtype int8 needs; write one",
    ),
    *(
        ("pad", {"shape": (2,), "pads": (1, 1), "value": value, "dtype": dtype}, f"value {value} is too large for dtype {dtype}; ")
        for value, dtype in [(1e5, "float16"), (-1e39, "float32"), (449.0 + 32, "float8_e4m3fn"), (128.0, "int8"), (-1.0, "uint8")]
    ),
    ("adaptive_pool2d", {"op": "max", "n": 1, "h": 4, "w": 4, "c": 1, "rows": 5, "columns": 1}, "rows 5 is more than the image has, 4; "),
    ("resize2d", {"op": "nearest", "n": 1, "h": 65536, "w": 1, "c": 1, "rows": 65536, "columns": 1}, "resizing 65536 x 1 to 65536 x 1 "),
]


@pytest.mark.parametrize(("value", "dtype"), [(-65504.0, "float16"), (-1.7e308, "float64"), (-128.0, "int8"), (-(2.0**63), "int64")])
def test_margins_may_hold_the_least_number_of_their_dtype(value: float, dtype: str) -> None:
    assert not list(rule("pad", shape=(2,), pads=(1, 1), value=value, dtype=dtype).problems())


@pytest.mark.parametrize(("name", "attrs", "sentence"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_what_makes_no_sense_is_one_sentence(name: str, attrs: dict[str, Any], sentence: str) -> None:
    (problem,) = rule(name, **attrs).problems()
    assert problem.startswith(sentence)
