"""Owns what tests on a GPU share: their kernels, and the process that runs them.

Knows nothing of what is tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gpu_additions import addition, measuring
from support.gpu_kernels import Case, Checked, Kernels


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    """Return the kernels of all cases that the chosen tests have for parameters; they are built from the first test on, in order."""
    with Kernels(tmp_path_factory.mktemp("kernels")) as made:
        for item in request.session.items:
            for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
                if isinstance(value, Case):
                    made.start(value)
        yield made


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return a function that builds an addition with a line of CUDA at its end, and returns its library and symbol."""
    return functools.partial(addition, tmp_path)


@pytest.fixture
def measure() -> Iterator[Callable[..., dict[str, Any]]]:
    """Return a function that sends requests to the worker that measures on the first GPU of the arch."""
    with measuring() as ask:
        yield ask


@pytest.fixture(scope="module")
def check(kernels: Kernels) -> Iterator[Checked]:
    """Return a function that runs the kernels of a case and compares; it holds the GPU until the module's tests are done."""
    with Checked(kernels) as checked:
        yield checked
