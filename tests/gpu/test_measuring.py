"""Owns the tests of measuring on a real GPU: good kernels pass and are timed, bad ones are reported.

Knows nothing of policies. Bad kernels are good ones with a line of CUDA added at their end.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support.gpu_additions import H200, SIZE, spec

from kerneldecl.arrays import numpy_dtype, random_array, relative_error, row_scales
from kerneldecl.hardware.gpu_lock import gpus_of, held_gpu
from kerneldecl.runners.cuda_checks.checks import DTYPES, Checks
from kerneldecl.runners.cuda_device import device
from kerneldecl.signature import Arg

pytestmark = pytest.mark.gpu

WRONG = "Y_ptr[7] = 1000.0f;"
UNWRITTEN = "Y_ptr[7] = __int_as_float(-1);"
BEHIND = f"if (threadIdx.x == 0) Y_ptr[{SIZE}] = 0.0f;"
BEFORE = "if (threadIdx.x == 0) Y_ptr[-1] = 0.0f;"
INPUT = "if (threadIdx.x == 0) X_ptr[3] += 1.0f;"
TRAP = 'asm volatile("trap;");'
UNMAPPED = "*(volatile float*)16 = 1.0f;"
HANG = "while (true) __nanosleep(1000);"


def test_a_right_kernel_passes_and_is_timed(built: Any, measure: Any) -> None:
    good = built()
    assert measure("prepare", spec=spec()) == {}
    verdict = measure("verify", spec=spec(), **good)
    assert verdict["error"] <= 1e-6
    assert 0 < verdict["secs"] < 1
    sampled = measure("sample", spec=spec(), calls=20, samples=5, **good)["samples"]
    assert len(sampled) == 5
    assert all(0 < secs < 1e-3 for secs in sampled)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_arguments_that_fill_no_whole_word_are_compared(built: Any, measure: Any, size: int) -> None:
    assert measure("verify", spec=spec(size), **built(size=size))["error"] <= 1e-6
    assert measure("verify", spec=spec(size), **built("if (threadIdx.x == 0) X_ptr[0] += 1.0f;", size))["failure"].endswith("its input X")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (BEHIND, "wrote at least 4 bytes outside of its arguments"),
        (BEFORE, "wrote at least 4 bytes outside of its arguments"),
        (INPUT, "writes into its input X"),
        (TRAP, "CUDA_ERROR_"),
        (UNMAPPED, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ],
    ids=["behind", "before", "input", "trap", "unmapped"],
)
def test_a_harmful_kernel_is_reported_and_the_next_one_is_measured(built: Any, measure: Any, line: str, reason: str) -> None:
    bad, good = built(line), built()
    assert measure("verify", spec=spec(), **good)["error"] <= 1e-6
    assert reason in measure("verify", spec=spec(), **bad)["failure"]
    for _ in range(2):
        assert measure("verify", spec=spec(), **good)["error"] <= 1e-6
    assert measure("sample", spec=spec(), calls=3, samples=1, **good)["samples"]


FIRST = "if (blockIdx.x == 0 && threadIdx.x == 0)"
LATER = f"static int calls = 0; {FIRST} if (++calls > {{}}) Y_ptr[7] = 1000.0f;"
"""Wrong after so many calls."""
KEPT = f"static float* kept; {FIRST} {{ if (!kept) kept = Y_ptr; float y = Y_ptr[7]; Y_ptr[7] = __int_as_float(-1); kept[7] = y; }}"
"""Writes where the output lay in the first call."""
OWN = "{{ int at = blockIdx.x * 128 + threadIdx.x; if (at < {}) {} }}".format
SWALLOWED = OWN(SIZE, "if (isnan(Y_ptr[at])) Y_ptr[at] = 0.0f;")
CLOCKED = OWN(SIZE, "Y_ptr[at] *= 1.0f + 3e-6f * (clock64() % 7);")


@pytest.mark.parametrize("line", [LATER.format(1), KEPT, SWALLOWED], ids=["second call", "kept address", "NaN"])
def test_a_kernel_that_is_right_in_its_first_call_alone_is_wrong(built: Any, measure: Any, line: str) -> None:
    verdict = measure("verify", spec=spec(), **built(line))
    assert verdict.get("failure", "") or verdict["error"] > 1
    assert measure("verify", spec=spec(), **built())["error"] <= 1e-6


def test_a_kernel_that_is_right_until_it_was_timed_is_not_confirmed(built: Any, measure: Any) -> None:
    late = built(LATER.format(20))
    assert measure("verify", spec=spec(), **late)["error"] <= 1e-6
    assert measure("sample", spec=spec(), calls=30, samples=1, **late)["samples"]
    assert measure("confirm", spec=spec(), **late)["error"] > 1


def test_results_that_differ_from_call_to_call_are_told(built: Any, measure: Any) -> None:
    verdict = measure("verify", spec=spec(), **built(CLOCKED))
    assert verdict["error"] <= 1e-4
    assert verdict["differs"]


@pytest.mark.parametrize("line", [WRONG, UNWRITTEN], ids=["wrong", "unwritten"])
def test_wrong_numbers_are_an_error_beyond_any_tolerance(built: Any, measure: Any, line: str) -> None:
    assert measure("verify", spec=spec(), **built(line))["error"] > 1
    assert measure("verify", spec=spec(), **built())["error"] <= 1e-6


def test_a_kernel_that_hangs_is_ended(built: Any, measure: Any) -> None:
    hanging, good = built(HANG), built()
    assert measure("verify", spec=spec(), **good)["error"] <= 1e-6
    assert measure("verify", 3.0, spec=spec(), **hanging)["failure"] == "took more than 3 s"
    assert measure("verify", spec=spec(), **good)["error"] <= 1e-6


@pytest.mark.parametrize("size", [1, 3, 1 << 10, (1 << 22) + 5])
def test_sizes_from_one_element_to_more_than_a_cache(built: Any, measure: Any, size: int) -> None:
    kernel = built(size=size)
    assert measure("verify", spec=spec(size), **kernel)["error"] <= 1e-6
    assert len(measure("sample", spec=spec(size), calls=64, samples=2, **kernel)["samples"]) == 2


def test_twice_the_work_is_twice_the_time(built: Any, measure: Any) -> None:
    """Kernels that wait for a number of clock cycles, at 1 to 3 GHz."""
    wait = "{{ long long start = clock64(); while (clock64() - start < {}) {{}} }}"
    short, long = built(wait.format(20_000)), built(wait.format(40_000))
    measure("sample", spec=spec(), calls=10, samples=3, **short)  # brings the clock up
    times = [min(measure("sample", spec=spec(), calls=10, samples=9, **kernel)["samples"]) for kernel in (short, long)]
    assert 20_000 / 3e9 < times[0] < 20_000 / 1e9
    assert 1.5 < times[1] / times[0] < 2.1


def test_measured_peaks_and_conditions_of_the_gpu(built: Any, measure: Any) -> None:
    measure("sample", spec=spec(), calls=1, samples=1, **built())
    found = measure("measured_peaks")
    assert 0.7 < found["dram_bytes_per_s"] / H200.the_gpu.dram_bytes_per_s < 1.0
    assert found["device"]["gpu"] == H200.model
    names = {gpu.short_uuid: gpu for gpu in gpus_of(H200.model)}
    found_gpu = names[found["conditions"]["measured_on"]["gpu"]]
    assert found["conditions"]["measured_on"]["pci"] == found_gpu.pci
    assert len(found_gpu.short_uuid) == len("GPU-01234567") < len(found_gpu.uuid), "the whole is a serial number"
    assert measure("is_there") == {}
    if found["conditions"]["after"]:
        assert found["conditions"]["before"]["sm_clock_hz"] > 1e8


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "bool"])
@pytest.mark.parametrize("count", [1, 1000, 3_000_001])
def test_the_gpu_compares_as_numpy_does(dtype: str, count: int) -> None:
    gpu = device()
    checks = Checks(gpu)
    rng = np.random.default_rng(0)
    got = random_array(rng, Arg("Y", (count,), dtype))
    for want_dtype in ("float64", "float32"):
        want = (got.astype(np.float64) + 1e-3 * rng.standard_normal(count)).astype(want_dtype)
        addresses = [gpu.allocate(array.nbytes) for array in (got, want)]
        for array, address in zip((got, want), addresses, strict=True):
            gpu.upload(array, address)
        rms = np.array([checks.rms(addresses[1], want_dtype, count)])
        of_rows = row_scales(want.reshape(-1, 1000), 0.5) if count == 1000 else np.linspace(0.5, 1.0, count)
        for scales, expected in ((rms, relative_error(got, want)), (of_rows, relative_error(got, want, of_rows))):
            found = checks.relative_error((addresses[0], dtype), (addresses[1], want_dtype), count, scales)
            assert found == pytest.approx(expected, rel=1e-9)
        before = checks.checksum(addresses[1], want.nbytes)
        gpu.upload(np.zeros(1, numpy_dtype(want_dtype)), addresses[1] + want.nbytes - want.itemsize)
        assert (checks.checksum(addresses[1], want.nbytes) == before) == (want[-1] == 0)
        for address in addresses:
            gpu.release(address)


HOLDER = """
import sys, time
from kerneldecl.hardware.gpu_lock import held_gpu
with held_gpu(sys.argv[1], print):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_a_gpu() -> None:
    count = len(gpus_of(H200.model))
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, H200.model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for holder in holders:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        for holder in holders:
            holder.communicate()  # which ends it

    with held_gpu(H200.model, say) as gpu:
        assert gpu.model == H200.model
    assert "is measuring on NVIDIA H200: waiting for it to finish" in said[0]
