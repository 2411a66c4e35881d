"""Owns the tests of the quick judgement of attributes: what it accepts, pydantic accepts unchanged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from annotated_types import Gt, Len, MultipleOf
from pydantic import ConfigDict, TypeAdapter

from kerneldecl.declare.plain_types import plainly_is
from kerneldecl.rule import Dtype, Extent, Size, WorkspaceFile

HINTS: list[Any] = [
    *(bool, int, float, str, Extent, Size, Dtype, WorkspaceFile, Literal["a", 1, True], Annotated[float, Gt(0)], Annotated[str, Len(1)]),
    *(tuple[int, ...], tuple[Extent, ...], tuple[int, int], Annotated[tuple[int, ...], Len(1, 2)], tuple[tuple[int, int], ...]),
    *(int | float, int | tuple[int, ...], tuple[Literal["x", "y"], ...]),
]
VALUES: list[Any] = [
    *(0, 1, -1, True, False, 1.5, 0.0, float("inf"), float("nan"), "", "a", "x", "float16", "1"),
    *((), (1,), (1, 2), (1, 2, 3), ("x",), ("x", "z"), ((1, 2),), (1.0,), (0,), (True,)),
]


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_what_is_plainly_right_is_right_to_pydantic(hint: Any) -> None:
    is_right = plainly_is(hint)
    assert is_right
    judge = TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False)).validator.validate_python
    accepted = [value for value in VALUES if is_right(value)]
    assert accepted
    assert [repr(judge(value)) for value in accepted] == [repr(value) for value in accepted]


@pytest.mark.parametrize("hint", [Annotated[int, MultipleOf(4)], tuple, int | None, tuple[Annotated[int, MultipleOf(2)], ...]], ids=str)
def test_other_types_are_left_to_pydantic(hint: Any) -> None:
    assert plainly_is(hint) is None
