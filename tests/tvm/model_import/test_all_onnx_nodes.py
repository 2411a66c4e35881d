"""Owns the test that each of ONNX's own node tests gives the expected outputs or is refused by the sentence that is listed for it.

Knows nothing of kernels: TVM alone compiles the models.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from support.onnx_nodes import as_it_is, cases, difference, has_constants, with_constants

from kerneldecl.compiler.model_import.model_error import IMPORT_ERRORS, ModelError

pytestmark = pytest.mark.slow

LISTED = Path(__file__).with_name("onnx_refused.txt")
CHUNKS = 32
RELEASE = "1.23.2"
"""The release of onnx whose cases are listed: another one has others."""
_RIGHT = "right"


@functools.cache
def listed() -> dict[str, str]:
    """Return the sentence by which each listed case is refused: sentences stand at the margin, their cases are indented below."""
    found, sentence = {}, ""
    for line in LISTED.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            found.update(dict.fromkeys(line.split(), sentence))
        else:
            sentence = line
    return found


def verdict(name: str) -> str:
    """Return "right", how a case is wrong, or the sentence by which it is refused, both with what models have as constants and without."""
    case = cases()[name]
    refused = ""
    for model, args in _attempts(case):
        try:
            wrong = difference(case, model, args)
        except ModelError as error:
            refused = re.sub(r" \(node [^()]*(\([^()]*\))?[^()]*\)", "", error.sentence) if error.hint else "no way out is named"
        except IMPORT_ERRORS as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
        else:
            return f"WRONG: {wrong}" if wrong else _RIGHT
    return refused


def _attempts(case: object) -> Iterator[tuple[object, list[object]]]:
    yield as_it_is(case)
    if has_constants(case):
        yield with_constants(case)


@pytest.mark.skipif(onnx.__version__ != RELEASE, reason=f"the cases are those of onnx {RELEASE}")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_node_is_right_or_refused_as_listed(chunk: int) -> None:
    names = sorted(cases())[chunk::CHUNKS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of the reference by which constants are computed
        found = {name: verdict(name) for name in names}
    expected = {name: listed().get(name, _RIGHT) for name in names}
    assert found == expected


@pytest.mark.skipif(onnx.__version__ != RELEASE, reason=f"the cases are those of onnx {RELEASE}")
def test_every_listed_case_is_one() -> None:
    assert set(listed()) <= set(cases())
