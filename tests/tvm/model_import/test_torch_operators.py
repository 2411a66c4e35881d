"""Owns the test that operators of torch that TVM's importer lacks, or computes otherwise, compute what torch computes.

Knows nothing of kernels: TVM alone compiles each, without optimisations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from support.thinned import every
from tvm import relax

from kerneldecl.compiler.model_import.from_torch import module_of_program
from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.read_model import fused

torch = pytest.importorskip("torch", reason="torch programs need torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of its own deprecated functions
F = torch.nn.functional
torch.manual_seed(0)
X, Y, IMAGES = torch.randn(3, 4, 6), torch.randn(3, 4, 6), torch.randn(2, 4, 8, 8)
INTEGERS, POSITIVE = torch.randint(-5, 9, (3, 4, 6)), torch.randint(1, 5, (3, 4, 6))
PLACES, SOURCE = torch.randint(0, 4, (3, 2, 6)), torch.randn(3, 2, 6)
NODES, EDGES, ROWS = torch.randn(5, 8), torch.randint(0, 5, (20,)), torch.randn(20, 8)
IDS, TABLE = torch.randint(0, 10, (4, 5)), torch.randn(10, 8)
MODES = ("sum", "mean", "max")
STARTS = torch.tensor([0, 3, 3, 11])
GRID = torch.rand(2, 5, 7, 2) * 2.4 - 1.2

OPERATORS: dict[str, tuple[Callable[..., Any], *tuple[Any, ...]]] = {
    "amax of several axes": (lambda x: x.amax((0, 2)), X),
    "amin that keeps its axis": (lambda x: x.amin(1, keepdim=True), X),
    "logsumexp": (lambda x: x.logsumexp(1), X),
    "product of int32": (lambda x: x.prod(1), POSITIVE.int()),
    "min with places": (lambda x: tuple(x.min(1)), X),
    "any along an axis": (lambda x: (x > 0).any(1), X),
    "cumulative sum of truth values": (lambda x: (x > 0).cumsum(-1), X),
    "cumulative sum of int32": (lambda x: x.cumsum(-1), INTEGERS.int()),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), X, PLACES, SOURCE),
    "scatter_add of a part": (lambda x, i, s: x.scatter_add(1, i[:2], s), X, PLACES, SOURCE),
    **{
        f"scatter_reduce {name}, {'with' if own else 'without'} its own": (
            lambda x, i, s, name=name, own=own: x.scatter_reduce(1, i, s, name, include_self=own),
            X,
            PLACES,
            SOURCE,
        )
        for name in ("sum", "mean", "amax", "prod")
        for own in (True, False)
    },
    "index_add": (lambda x, i, s: x.index_add(0, i, s), NODES, EDGES, ROWS),
    "index_add of a middle axis": (lambda x, i, s: x.index_add(1, i, s, alpha=2), NODES[None], EDGES, ROWS[None]),
    "a value at a mask": (lambda x: x.index_put((x > 0,), torch.tensor(7.0)), X),
    "a value at a mask of rows": (lambda x: x.index_put((x[:, 0, 0] > 0,), torch.tensor(7.0)), X),
    **{f"embedding bags, {mode}": (lambda i, t, mode=mode: F.embedding_bag(i, t, mode=mode), IDS, TABLE) for mode in MODES},
    "embedding bags with weights": (lambda i, t, w: F.embedding_bag(i, t, mode="sum", per_sample_weights=w), IDS, TABLE, torch.rand(4, 5)),
    "embedding bags with padding": (lambda i, t: F.embedding_bag(i, t, padding_idx=3), IDS, TABLE),
    "embedding bags by offsets": (lambda i, t, o: F.embedding_bag(i, t, o, mode="mean"), IDS.reshape(-1), TABLE, STARTS),
    "embedding bags by offsets with an end": (
        lambda i, t, o: F.embedding_bag(i, t, o, mode="sum", include_last_offset=True),
        IDS.reshape(-1),
        TABLE,
        STARTS,
    ),
    **{f"distances, p={p}": (lambda x, y, p=p: torch.cdist(x, y, p), X, Y) for p in (0.0, 1.0, 2.0, 3.0, float("inf"))},
    "integers divided by a number, rounded down": (lambda x: x // 3, INTEGERS),
    "integers divided by a number, cut off": (lambda x: torch.div(x, 3, rounding_mode="trunc"), INTEGERS),
    "a quotient rounded down": (lambda x: torch.div(x, 0.3, rounding_mode="floor"), X),
    "a scaled term": (lambda x, y: torch.add(x, y, alpha=3), INTEGERS, POSITIVE),
    "a scaled term less": (lambda x, y: torch.sub(x, y, alpha=0.5), X, Y),
    "integers and a fraction": (lambda x: (x + 1.5, x - 0.5, x * 0.3), INTEGERS),
    "one by integers": (lambda x: 1 / x, POSITIVE),
    "the root of integers": (lambda x: x.sqrt(), POSITIVE),
    "variance and mean": (lambda x: torch.var_mean(x, (1, 2)), X),
    "selu": (F.selu, X),
    "elu": (lambda x: F.elu(x, 0.5), X),
    "indices from the end": (lambda x, i: x[i], X, torch.tensor([-1, 0])),
    "constant indices from the end": (lambda x: x[:, [0, -1]], X),
    "indices of two axes": (lambda x, i: x[i, i - 1], X, torch.tensor([0, 2])),
    "indices of two axes that are not neighbours": (lambda x, i: x[i, :, i], X, torch.tensor([0, 2])),
    "indices of the last two axes": (lambda x, i: x[:, i[:, None], i], X, torch.tensor([0, 2])),
    "windows of an axis": (lambda x: x.unfold(2, 3, 2), X),
    "windows of the first axis": (lambda x: x.unfold(0, 2, 1), X),
    "unfold of images": (lambda x: F.unfold(x, 3, padding=1, stride=2), IMAGES),
    "nearest pixels of volumes": (lambda x: F.interpolate(x, scale_factor=2), X[None, None]),
    "linear interpolation of volumes": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), X[None, None]),
    "nearest pixels of another size": (lambda x: F.interpolate(x, (5, 11)), IMAGES),
    "nearest pixels by a scale": (lambda x: F.interpolate(x, scale_factor=1.7), IMAGES),
    "bilinear by a scale": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), IMAGES),
    "bicubic by a scale": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"), IMAGES),
    **{
        f"{mode}, antialiased, to {size}": (lambda x, size=size, mode=mode: F.interpolate(x, size, mode=mode, antialias=True), IMAGES)
        for mode in ("bilinear", "bicubic")
        for size in ((5, 3), (11, 5))
    },
    **{
        f"grid_sample, {mode}": (
            lambda x, g, mode=mode: F.grid_sample(x, g, mode, "border", align_corners=False),
            IMAGES,
            GRID,
        )
        for mode in ("bilinear", "nearest")
    },
    "average pooling with a divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), IMAGES),
    "adaptive maximum pooling": (lambda x: F.adaptive_max_pool2d(x, (2, 1)), IMAGES),
    "adaptive maximum pooling of lines": (lambda x: F.adaptive_max_pool1d(x, 1), X),
}
REFUSED: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "indices of maxima": (lambda x: F.max_pool2d(x, 2, return_indices=True)[1], IMAGES, "indices"),
    "uneven maxima": (lambda x: F.adaptive_max_pool2d(x, 3), IMAGES, "windows of several sizes"),
    "bags of maxima by offsets": (
        lambda i: F.embedding_bag(i, torch.ones(10, 8), torch.tensor([0, 3]), mode="max"),
        IDS.reshape(-1),
        "mode max with offsets",
    ),
}


class _Of(torch.nn.Module):  # type: ignore[misc]  # torch may be missing
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def computed(mod: tvm.IRModule, args: tuple[Any, ...]) -> list[Any]:
    machine = relax.VirtualMachine(relax.build(fused(mod), tvm.target.Target({"kind": "llvm", "opt-level": 0})), tvm.cpu())
    found = machine["main"](*(tvm.runtime.from_dlpack(arg.contiguous()) for arg in args))
    return [torch.from_dlpack(each) for each in (found if isinstance(found, (list, tuple)) or not hasattr(found, "numpy") else [found])]


@pytest.mark.parametrize("name", every(7, OPERATORS))
def test_an_operator_computes_what_torch_computes(name: str) -> None:
    function, *args = OPERATORS[name]
    expected = function(*args)
    found = computed(module_of_program(torch.export.export(_Of(function), tuple(args))), tuple(args))
    for ours, theirs in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_otherwise_is_refused_with_its_node(name: str) -> None:
    function, arg, sentence = REFUSED[name]
    with pytest.raises(ModelError, match=sentence) as error:
        module_of_program(torch.export.export(_Of(function), (arg,)))
    assert "(node " in error.value.sentence
    assert error.value.hint


class _Positions(torch.nn.Module):  # type: ignore[misc]
    """Positions are a slice of a table, as those of BERT; the ends of a row are read and repeated, as GPT-2 finds packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(16, 8))

    def forward(self, x: Any) -> Any:
        rows = x + self.table[: x.shape[1]]
        ends = torch.cat([rows[:, :1], rows], 1)
        return ends[:, 1:] - ends[:, :-1], self.table[:1].repeat(x.shape[0], 1)


def test_instance_norms_take_any_number_of_images() -> None:
    norm = torch.nn.InstanceNorm1d(4, affine=True)
    torch.nn.init.normal_(norm.weight)
    mod = module_of_program(torch.export.export(norm, (X,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},)))
    (found,) = computed(mod, (X,))
    torch.testing.assert_close(found, norm(X).detach(), rtol=1e-4, atol=1e-5)


def test_slices_of_dynamic_extent_have_the_shape_that_torch_knows() -> None:
    batch, tokens = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("tokens", min=2, max=16)
    x, model = torch.randn(3, 5, 8), _Positions()
    mod = module_of_program(torch.export.export(model, (x,), dynamic_shapes=({0: batch, 1: tokens},)))
    assert "T.min" not in mod.script()
    for ours, theirs in zip(computed(mod, (x,)), model(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_operator_that_neither_importer_converts_is_refused_with_its_node() -> None:
    class Resampled(torch.nn.Module):  # type: ignore[misc]  # torch may be missing
        def forward(self, x: Any) -> Any:
            return F.interpolate(x, (5, 7), mode="bicubic", antialias=True)

    program = torch.export.export(Resampled(), (IMAGES,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},))
    with pytest.raises(ModelError, match=r"no converter for torch's operator .*bicubic2d_aa.* \(node .*\) of these shapes"):
        module_of_program(program)
