"""Owns the tests of the checks that run on a GPU: their arithmetic, compiled for a CPU, and their PTX, compared with nvcc's.

Knows nothing of kernels.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kerneldecl.arrays import Array, numpy_dtype, poisoned, random_array, relative_error, row_scales
from kerneldecl.errors import ToolchainError
from kerneldecl.runners.cuda_checks.checks import DTYPES, PTX
from kerneldecl.signature import Arg
from kerneldecl.store.keys import digest
from kerneldecl.toolchain import cxx, nvcc

SOURCE = PTX.with_suffix(".cu")
FLAGS = ("-ptx", "-O3", "-std=c++17", "-arch=compute_75")
RELEASE = "13.0.88"
EIGHT_BITS = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
SIXTEEN_BITS = ("int16", "uint16", "float16", "bfloat16")


def ptx_of_source() -> str:
    """Return the PTX without the compiler's comments, under the digest of its source."""
    command = [nvcc.compiler().path, *FLAGS, "-o", "/dev/stdout", str(SOURCE)]
    ptx = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in ptx.splitlines() if line.strip() and not line.lstrip().startswith("//")]
    return f"// nvcc {RELEASE} {' '.join(FLAGS)} checks.cu, of SHA-256 {digest(SOURCE.read_bytes())}\n" + "\n".join(lines) + "\n"


def has_the_compiler() -> bool:
    try:
        return nvcc.compiler().version == RELEASE
    except ToolchainError:
        return False


@pytest.mark.skipif(not has_the_compiler(), reason=f"nvcc {RELEASE} is not here")
def test_ptx_is_nvccs_output_for_the_source(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        PTX.write_text(ptx_of_source(), encoding="ascii")
    assert PTX.read_text(encoding="ascii") == ptx_of_source()


def test_ptx_belongs_to_the_source() -> None:
    assert digest(SOURCE.read_bytes()) in PTX.read_text(encoding="ascii").partition("\n")[0]
    assert ".target sm_75\n" in PTX.read_text(encoding="ascii")


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("checks") / "checks.so"
    flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([cxx.compiler(), *flags, "-x", "c++", str(SOURCE), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def of(array: Array) -> tuple[Any, ...]:
    return ctypes.c_void_p(array.ctypes.data), DTYPES.index(array.dtype.name)


def rms_of(checks: ctypes.CDLL, want: Array) -> float:
    total, finite = ctypes.c_double(), ctypes.c_uint64()
    checks.square_sums(*of(want), ctypes.c_uint64(want.size), ctypes.byref(total))
    checks.finite_counts(*of(want), ctypes.c_uint64(want.size), ctypes.byref(finite))
    return math.sqrt(total.value / finite.value) if finite.value else 0.0


def error_of(checks: ctypes.CDLL, got: Array, want: Array, scales: Array | None = None, *, any_for_nan: bool = False) -> float:
    largest = ctypes.c_double()
    scales = np.array([rms_of(checks, want)]) if scales is None else scales
    rows = ctypes.c_void_p(scales.ctypes.data), ctypes.c_uint64(want.size // scales.size)
    checks.largest_errors(*of(got), *of(want), ctypes.c_uint64(want.size), *rows, ctypes.c_int(any_for_nan), ctypes.byref(largest))
    return largest.value


def close(value: float, expected: float) -> bool:
    return value == expected or math.isclose(value, expected, rel_tol=1e-12)


@pytest.mark.parametrize("got_dtype", [dtype for dtype in DTYPES if dtype != "bool"])
@pytest.mark.parametrize("want_dtype", ["float64", "float32", "int64"])
def test_the_error_is_that_of_numpy(checks: ctypes.CDLL, got_dtype: str, want_dtype: str) -> None:
    rng = np.random.default_rng(0)
    got = random_array(rng, Arg("Y", (1001,), got_dtype))
    for disturbance in (0.0, 1e-3, 3.0):
        want = (got.astype(np.float64) + disturbance * rng.standard_normal(got.shape)).astype(want_dtype)
        assert close(error_of(checks, got, want), relative_error(got, want))


def test_rows_have_scales_of_their_own_as_in_numpy(checks: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    want = rng.standard_normal((3, 7, 40)) * np.logspace(-3, 0, 7)[:, None]
    got = (want + 1e-3 * rng.standard_normal(want.shape)).astype(np.float16)
    scales = row_scales(want, 0.5)
    assert close(error_of(checks, got, want, scales), relative_error(got, want, scales))


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, *SIXTEEN_BITS])
def test_every_value_of_a_narrow_dtype_is_read_right(checks: ctypes.CDLL, dtype: str) -> None:
    bits = 8 if dtype in EIGHT_BITS else 16
    values = np.arange(1 << bits, dtype=f"uint{bits}").view(numpy_dtype(dtype))
    with np.errstate(invalid="ignore"):
        exact = values.astype(np.float64)
        off = np.nextafter(exact, np.inf)
    assert error_of(checks, values, exact) == 0.0
    for at in np.flatnonzero(np.isfinite(exact))[:: 1 if bits == 8 else 97]:
        assert 0 < error_of(checks, values[at : at + 1], off[at : at + 1]) < 1e-15 or exact[at] == 0


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ([1.0, np.nan], [1.0, 2.0]),
        ([np.nan], [np.nan]),
        ([np.inf, -np.inf], [np.inf, -np.inf]),
        ([np.nan, 5.0], [np.inf, 5.0]),
        ([np.inf], [1.0]),
        ([1.0, 5.0], [np.inf, 5.0]),
        ([-np.inf, 5.0], [np.inf, 5.0]),
        ([1.0], [np.nan]),
        ([1e-300], [0.0]),
        ([0.0, -0.0], [-0.0, 0.0]),
        ([1.0, 2.0], [1e-8, 2.0]),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_not_finite_counts_as_in_numpy(checks: ctypes.CDLL, got: list[float], want: list[float], dtype: str) -> None:
    arrays = np.array(got).astype(dtype), np.array(want)
    for any_for_nan in (False, True):
        assert close(error_of(checks, *arrays, any_for_nan=any_for_nan), relative_error(*arrays, any_for_nan=any_for_nan))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "bool"])
def test_poison_never_passes(checks: ctypes.CDLL, dtype: str) -> None:
    """Outputs of a kernel that writes nothing: the bytes that runners.cuda fills them with."""
    arg = Arg("Y", (64,), dtype)
    want = random_array(np.random.default_rng(1), arg).astype(np.float64)
    assert error_of(checks, poisoned(arg), want) > 0.5


def test_a_byte_that_is_no_bool_is_an_error(checks: ctypes.CDLL) -> None:
    want = np.array([True, False])
    assert error_of(checks, want.copy(), want) == 0.0
    assert error_of(checks, np.array([1, 0xA5], np.uint8).view(bool), want) > 1


def checksum(checks: ctypes.CDLL, array: Array) -> int:
    found = ctypes.c_uint64()
    checks.checksums(ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(array.nbytes // 8), ctypes.byref(found))
    return found.value


@pytest.mark.parametrize(
    "change",
    [
        lambda words: words.__setitem__(0, 1),
        lambda words: words.__setitem__(slice(3, 5), words[[4, 3]]),
        lambda words: words.view(np.uint8).__setitem__(799, 7),
    ],
    ids=["a word", "two words swapped", "the last byte"],
)
def test_a_checksum_sees_changes(checks: ctypes.CDLL, change: Callable[[Array], None]) -> None:
    words = np.random.default_rng(2).integers(0, 1 << 63, 100, np.uint64)
    before = checksum(checks, words)
    assert checksum(checks, words.copy()) == before
    change(words)
    assert checksum(checks, words) != before


def test_bytes_that_changed_are_counted(checks: ctypes.CDLL) -> None:
    guard, found = np.full(1001, 0x5A, np.uint8), ctypes.c_uint64()
    guard[[0, 500, 1000]] = 1
    checks.other_bytes(ctypes.c_void_p(guard.ctypes.data), ctypes.c_uint64(guard.size), 0x5A, ctypes.byref(found))
    assert found.value == 3
