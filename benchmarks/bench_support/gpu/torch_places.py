"""Owns torch's calls for windows and places: convolutions of any rank and layout, pooling, resizing, lookups, scans, sorted rows, movers.

Knows nothing of kerneldecl's kernels, references or timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own custom
from bench_support.gpu.timing import Call
from bench_support.gpu.torch_rules import STEPS, Args, Attrs, Tensor, applied

Baselines = Mapping[str, Call]
Make = Callable[[Attrs, Sequence[Args]], Baselines]


def convolution(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return cuDNN's fastest algorithm, in the entry's layout as a view of it, and channels first where the entry has them last."""
    sides = sets[0][0].ndim - 2
    steps = attrs["epilogue"]
    if not all(step in STEPS or step == "bias" for step in steps) or "bias" in steps[1:]:
        return {}
    is_first = attrs["layout"][1] == "c"
    has_bias = bool(steps) and steps[0] == "bias"
    pads = attrs["pads"] or (attrs["padding"],) * (2 * sides)
    before, after = pads[:sides], pads[sides:]
    window = (attrs["strides"] or attrs["stride"], 0 if before != after else tuple(before), attrs["dilations"] or attrs["dilation"])
    around = [side for pair in zip(reversed(before), reversed(after), strict=True) for side in pair] if before != after else []
    conv = (F.conv1d, F.conv2d, F.conv3d)[sides - 1]
    order = (0, sides + 1, *range(1, sides + 1))

    def weights(w: Tensor) -> Tensor:
        return w if is_first else w.permute(sides + 1, sides, *range(sides))

    def call(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = conv(F.pad(x, around) if around else x, w, bias, *window, attrs["groups"])
        return applied(y, steps[has_bias:], [])

    def result(y: Tensor) -> Tensor:
        return y if is_first else y.permute(0, *range(2, sides + 2), 1)

    def bias(i: int) -> Tensor | None:
        return sets[i][2] if has_bias else None

    held = [(x if is_first else x.permute(order), weights(w).contiguous()) for x, w, *_ in sets]
    found: dict[str, Call] = {"own layout": lambda i: result(call(*held[i], bias(i)))}
    if not is_first:
        first = [(x.contiguous(), w) for x, w in held]
        found["channels first"] = lambda i: result(call(*first[i], bias(i)))
    return found


def transposed(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    is_first = attrs["layout"] == "nchw"
    if attrs["epilogue"]:
        return {}
    held = [(x, w) if is_first else (x.permute(0, 3, 1, 2), w.permute(2, 3, 0, 1)) for x, w, *_ in sets]
    last = [(x.contiguous(memory_format=torch.channels_last), w.contiguous(memory_format=torch.channels_last)) for x, w in held]

    def call(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv_transpose2d(x, w, None, attrs["stride"], attrs["padding"], attrs["extra"])
        return y if is_first else y.permute(0, 2, 3, 1)

    return {"own layout": lambda i: call(*held[i]), "channels last": lambda i: call(*last[i])}


def pool2d(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    is_first, window = attrs["layout"] == "nchw", ((attrs["kh"], attrs["kw"]), attrs["stride"], attrs["padding"])

    def call(x: Tensor) -> Tensor:
        if attrs["op"] == "max":
            return F.max_pool2d(x, *window)
        return F.avg_pool2d(x, *window, count_include_pad=attrs["count_padding"])

    def pooled(i: int) -> Tensor:
        x = sets[i][0]
        return call(x) if is_first else call(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    found: dict[str, Call] = {"pool": pooled}
    if (attrs["kh"], attrs["kw"], attrs["padding"]) == (attrs["h"], attrs["w"], 0):
        sides = (2, 3) if is_first else (1, 2)
        reduce = torch.amax if attrs["op"] == "max" else torch.mean
        found["reduction"] = lambda i: reduce(sets[i][0], sides, keepdim=True)
    return found


def adaptive_pool2d(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    is_first, size = attrs["layout"] == "nchw", (attrs["rows"], attrs["columns"])
    pool = F.adaptive_max_pool2d if attrs["op"] == "max" else F.adaptive_avg_pool2d

    def call(i: int) -> Tensor:
        x = sets[i][0]
        return pool(x, size) if is_first else pool(x.permute(0, 3, 1, 2), size).permute(0, 2, 3, 1)

    found: dict[str, Call] = {"pool": call}
    if size == (1, 1):
        reduce = torch.amax if attrs["op"] == "max" else torch.mean
        found["reduction"] = lambda i: reduce(sets[i][0], (2, 3) if is_first else (1, 2), keepdim=True)
    return found


def resize2d(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    is_first, size = attrs["layout"] == "nchw", (attrs["rows"], attrs["columns"])
    kinds = {("nearest", "asymmetric"): "nearest", ("nearest", "half_pixel"): "nearest-exact"}
    aligned = {"half_pixel": False, "align_corners": True}
    kind, corners = kinds.get((attrs["op"], attrs["coordinates"])), aligned.get(attrs["coordinates"])
    if attrs["op"] == "bilinear" and corners is not None:
        kind = "bilinear"
    if kind is None:
        return {}
    options: dict[str, Any] = {"align_corners": corners} if kind == "bilinear" else {}

    def call(i: int) -> Tensor:
        x = sets[i][0] if is_first else sets[i][0].permute(0, 3, 1, 2)
        y = F.interpolate(x, size, mode=kind, **options)
        return y if is_first else y.permute(0, 2, 3, 1)

    return {kind: call}


def pad(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    rank = len(attrs["shape"])
    sides = zip(reversed(attrs["pads"][:rank]), reversed(attrs["pads"][rank:]), strict=True)
    around = [side for pair in sides for side in pair]
    if attrs["mode"] != "constant":
        return {}
    return {"pad": lambda i: F.pad(sets[i][0], around, value=attrs["value"])}


def scatter_add(_: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return torch's index_add into a copy of the base, or into zeros; by atomic additions, and in one order where that is asked of it."""

    def call(i: int) -> Tensor:
        indices, updates, *base, out = sets[i]
        if base:
            out.copy_(base[0])
        else:
            out.zero_()
        return out.index_add_(0, indices, updates)

    return {"index_add": call}


PLACES: Mapping[str, Make] = {
    "conv1d": convolution,
    "conv3d": convolution,
    "conv2d_transpose": transposed,
    "pool2d": pool2d,
    "adaptive_pool2d": adaptive_pool2d,
    "resize2d": resize2d,
    "pad": pad,
    "scatter_add": scatter_add,
    "embedding": lambda _, sets: {"embedding": lambda i: F.embedding(sets[i][1], sets[i][0])},
    "take": lambda attrs, sets: {
        "index_select": lambda i: torch.index_select(sets[i][0], attrs["axis"], sets[i][1].reshape(-1)).view(sets[i][2].shape)
    },
    "arg_reduce": lambda attrs, sets: {attrs["op"]: lambda i: getattr(torch, attrs["op"])(sets[i][0], attrs["axis"])},
    "cumsum": lambda attrs, sets: (
        {} if attrs["exclusive"] or attrs["reverse"] else {"cumsum": lambda i: torch.cumsum(sets[i][0], attrs["axis"], out=sets[i][1])}
    ),
    "topk": lambda attrs, sets: {"topk": lambda i: torch.topk(sets[i][0], attrs["k"], largest=attrs["largest"])},
    "sort": lambda attrs, sets: {"sort": lambda i: torch.sort(sets[i][0], descending=attrs["descending"], stable=True)},
    "concat": lambda attrs, sets: {"cat": lambda i: torch.cat(list(sets[i][:-1]), attrs["axis"], out=sets[i][-1])},
    "cast": lambda _, sets: {"to": lambda i: sets[i][1].copy_(sets[i][0])},
    "where": lambda _, sets: {"where": lambda i: torch.where(sets[i][0].view(torch.bool), sets[i][1], sets[i][2])},
}
"""By rule. All of them take the rule's own inputs: places among them lie inside."""
