"""The sizes of dynamic dimensions: random inputs have them, and whatever does not fit a model is a sentence with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kerneldecl.deploy.error import DeployError
from kerneldecl.deploy.inputs import inputs_of, random_inputs
from kerneldecl.deploy.sizes import dimensions, each_choice, with_sizes


def signature(**shapes: list[int | str] | None) -> dict[str, Any]:
    return {"inputs": [{"name": name, "shape": shape, "dtype": "float32"} for name, shape in shapes.items()], "outputs": []}


TWO = signature(x=["batch", 3], y=["batch", "tokens"])


def test_every_combination_of_sizes_is_a_choice() -> None:
    choices = list(each_choice("main", TWO, {"tokens": [16], "batch": [1, 8]}))
    assert choices == [{"batch": 1, "tokens": 16}, {"batch": 8, "tokens": 16}]
    assert [array.shape for array in random_inputs(with_sizes(TWO, choices[1]))] == [(8, 3), (8, 16)]
    assert list(each_choice("main", signature(x=[2, 3]), {})) == [{}]


@pytest.mark.parametrize(
    ("extent", "value"),
    [("n + T.int64(1)", 8), ("n * T.int64(2) - 1", 13), ("(n + T.int64(1)) // T.int64(2)", 4), ("T.max(n % 4, T.int64(1))", 3)],
)
def test_an_extent_that_is_computed_is_known_with_what_it_is_computed_of(extent: str, value: int) -> None:
    described = signature(x=[extent, 3])
    assert dimensions(described) == ("n",)
    assert with_sizes(described, {"n": 7})["inputs"][0]["shape"] == [value, 3]


def test_an_expression_that_tvm_prints_in_other_words_stays_as_it_is() -> None:
    assert with_sizes(signature(x=["T.if_then_else(n, 1, 2)", "n ** 2"]), {"n": 7})["inputs"][0]["shape"] == [
        "T.if_then_else(n, 1, 2)",
        "n ** 2",
    ]


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({}, "y: float32[batch, tokens]) has dynamic dimensions; choose their sizes for random inputs: --dim batch=8 --dim tokens=8"),
        ({"batch": [1]}, "for random inputs: --dim tokens=8"),
        ({"bach": [1]}, "--dim bach: the model has no such dynamic dimension; it has batch, tokens of main("),
    ],
)
def test_sizes_that_do_not_fit_are_told(sizes: dict[str, list[int]], sentence: str) -> None:
    with pytest.raises(DeployError) as found:
        list(each_choice("main", TWO, sizes))
    assert sentence in str(found.value)


def test_a_static_model_has_no_dimension_to_choose() -> None:
    with pytest.raises(DeployError, match=r"no such dynamic dimension; it has none: main\(x: float32\[2\]\)"):
        list(each_choice("main", signature(x=[2]), {"n": [1]}))


def test_random_inputs_beside_a_file_have_the_sizes_of_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((5, 3), "float32"))
    file, random = inputs_of("main", TWO, [str(tmp_path / "x.npy"), "random"], {"tokens": [4]})
    assert (file.shape, random.shape) == ((5, 3), (5, 4))


def test_a_run_takes_one_size_of_each_dimension() -> None:
    with pytest.raises(DeployError, match="2 combinations of sizes are given; a run takes one size"):
        inputs_of("main", TWO, ["random"], {"batch": [1, 2], "tokens": [4]})
