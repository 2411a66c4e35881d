"""Owns the tests of calling an artifact's kernels: outputs, mistakes, dispatch, operators of torch.

Knows nothing of how kernels are built.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.spaces import Space

import kerneldecl
from kerneldecl.artifact.call import Kernel
from kerneldecl.artifact.load import Artifact

RNG = np.random.default_rng(11)
EXPECTED = "expected gemm(A: float32[16, 32], B: float32[32, 24]) -> C: float32[16, 24]"


@pytest.fixture(scope="module")
def expanded(built_real: Space, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return an artifact whose `gemm` was declared with 3 and with 5 rows."""
    space = built_real.copy_of(tmp_path_factory.mktemp("expanded") / "space", "cache", "workloads.lock")
    space.edit("workloads.toml", "m = 16", "m = [3, 5]")
    space.run_here("build", "--jobs", "1")
    return kerneldecl.load(space.artifact())


@pytest.fixture(scope="module")
def gemm(built_real: Space) -> Kernel:
    return kerneldecl.load(built_real.artifact())["gemm"]


def inputs(m: int = 16) -> tuple[Any, Any]:
    return RNG.standard_normal((m, 32), np.float32), RNG.standard_normal((32, 24), np.float32)


def test_a_kernel_says_what_it_takes(gemm: Kernel) -> None:
    assert repr(gemm) == "<matmul gemm(A: float32[16, 32], B: float32[32, 24]) -> C: float32[16, 24], layout nn, on the CPU>"
    assert str(inspect.signature(gemm)) == "(A: 'float32[16, 32]', B: 'float32[32, 24]', C: 'float32[16, 24]' = None, /)"


def test_outputs_are_those_given_or_new_ones_of_the_inputs_library(gemm: Kernel) -> None:
    a, b = inputs()
    out = np.empty((16, 24), np.float32)
    assert gemm(a, b, out) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-5)
    made = gemm(a, b)
    assert type(made) is np.ndarray
    np.testing.assert_array_equal(made, out)


@pytest.fixture
def added(tmp_path: Path, built_real: Space) -> Kernel:
    """Return a kernel of which either operand could be the result, by shape and dtype."""
    space = built_real.copy_of(tmp_path / "space", "cache")
    entry = 'name = "added"\nrule = "elementwise"\nop = "add"\nshape = [8, 16]\n'
    head = space.read("workloads.toml").partition("[[workload]]")[0]
    space.write({"workloads.toml": f"{head}[[workload]]\n{entry}"})
    space.run_here("build", "--jobs", "1")
    return kerneldecl.load(space.artifact())["added"]


def test_a_result_in_the_place_of_an_operand_is_refused_at_the_first_call_and_later(added: Kernel) -> None:
    whole = RNG.standard_normal((17, 16), np.float32)
    a, b, apart = whole[:8], whole[8:16], np.empty((8, 16), np.float32)
    message = "Y shares memory with {}, which added uses while it writes: pass an array of its own"
    names = [arg.name for arg in added.signature.inputs]
    assert [arg.name for arg in added.signature.outputs] == ["Y"]
    for out, name in ((a, names[0]), (whole[1:9], names[0]), (b, names[1])):
        with pytest.raises(ValueError, match=re.escape(message.format(name))):
            added(a, b, out)
    assert added(a, b, apart) is apart
    np.testing.assert_array_equal(added(a, a, apart), a + a)
    for out, name in ((a, names[0]), (b, names[1])):
        with pytest.raises(ValueError, match=re.escape(message.format(name))):
            added(a, b, out)


def test_torchs_tensors_give_torchs_outputs(gemm: Kernel) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    a, b = (torch.from_numpy(each) for each in inputs())
    weights = torch.nn.Parameter(b)
    made = gemm(a, weights)
    assert isinstance(made, torch.Tensor)
    assert not made.requires_grad
    torch.testing.assert_close(made, a @ b, rtol=1e-4, atol=1e-5)


def test_jaxs_arrays_give_jaxs_outputs(gemm: Kernel) -> None:
    jax = pytest.importorskip("jax", reason="needs JAX")
    a, b = inputs()
    made = gemm(jax.numpy.asarray(a), jax.numpy.asarray(b))
    assert isinstance(made, jax.Array)
    np.testing.assert_allclose(np.asarray(made), a @ b, rtol=1e-4, atol=1e-5)


class Foreign:
    """An array of a library that nobody knows."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **_: object) -> object:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_arrays_of_any_library_are_taken_with_the_outputs(gemm: Kernel) -> None:
    a, b = inputs()
    out = np.empty((16, 24), np.float32)
    gemm(Foreign(a), Foreign(b), Foreign(out))
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match=r"outputs cannot be allocated beside an array of \S*Foreign, only beside NumPy's, .* pass them"):
        gemm(Foreign(a), Foreign(b))


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


A, B = inputs()
MISTAKES: Sequence[tuple[tuple[Any, ...], str]] = [
    ((), f"0 arrays given; {EXPECTED}: pass 2, or 3 with the outputs to write"),
    ((A,), f"1 array given; {EXPECTED}: pass 2, or 3 with the outputs to write"),
    ((A.astype("float64"), B), f"A is float64[16, 32]; {EXPECTED}"),
    ((A, B.T.copy()), f"B is float32[24, 32]; {EXPECTED}"),
    ((A, B, np.empty((16, 24), "float16")), f"C is float16[16, 24]; {EXPECTED}"),
    ((A, B.T.copy().T), f"B is not contiguous (strides 1, 32): pass a contiguous copy; {EXPECTED}"),
    ((A, 3.0), f"B is of type float, which is no array (with __dlpack__); {EXPECTED}"),
    ((A, read_only(B.copy())), f"B is read-only, and NumPy shares no such memory through DLPack: pass a copy; {EXPECTED}"),
    ((A, B.astype(ml_dtypes.bfloat16)), f"B is bfloat16[32, 24]; {EXPECTED}"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES, ids=lambda value: value.partition(";")[0] if isinstance(value, str) else "")
def test_a_wrong_call_is_one_sentence_in_the_rules_names(gemm: Kernel, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        gemm(*args)
    assert str(caught.value) == message


@pytest.mark.slow
def test_a_dispatch_chooses_by_shape(expanded: Artifact) -> None:
    dispatch = expanded.dispatch("gemm")
    for rows in (3, 5):
        a, b = inputs(rows)
        assert dispatch.chosen(a, b) is expanded[f"gemm[m={rows}]"]
        np.testing.assert_allclose(dispatch(a, b), a @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_dispatch_says_what_it_lacks_or_falls_back(expanded: Artifact) -> None:
    a, b = inputs(4)
    with pytest.raises(
        ValueError, match=r"no kernel of gemm takes arrays of shapes \[4, 32\], \[32, 24\], and there is no fallback; there are "
    ):
        expanded.dispatch("gemm")(a, b)
    np.testing.assert_array_equal(expanded.dispatch("gemm", fallback=np.matmul)(a, b), a @ b)
    with pytest.raises(KeyError, match=r"no entry of .* is called 'gem'; it holds add, gemm, relu"):
        expanded.dispatch("gem")


def test_kernels_are_operators_of_torch(expanded: Artifact) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    expanded.torch_ops("kerneldecl_test")
    operators = expanded.torch_ops("kerneldecl_test")  # again: the second registration replaces the first
    a, b = (torch.from_numpy(each) for each in inputs(3))
    for operator in (operators.gemm_m_3, operators.gemm):
        # Schema, fake tensors and dispatch through torch's compiler, with open sizes and without.
        torch.library.opcheck(operator, (a, b))
    compiled = torch.compile(lambda x, y: operators.gemm(x + 1, y) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), ((a + 1) @ b) * 2, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(operators.gemm(a.T.contiguous().T, b), a @ b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cannot be a namespace"):
        expanded.torch_ops("my-kernels")
