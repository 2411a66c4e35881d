"""Owns NVML's readings of a GPU: clocks, reasons for throttling, temperature, power.

Knows nothing of what runs on the GPU. Readings that the library, or this GPU, does not have are left out.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
# nvmlClockType_t, nvmlTemperatureSensors_t and nvmlClocksEventReasons in nvml.h.
_SM_CLOCK, _MEMORY_CLOCK, _GPU_TEMPERATURE = 1, 2, 0
_REASONS = {
    0x01: "idle",
    0x02: "applications clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
    0x100: "display clocks",
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def driver_version() -> str:
    """Return the driver's version as nvidia-smi shows it; empty where it is unknown."""
    library, text = _library(), ctypes.create_string_buffer(80)
    known = library is not None and library.nvmlSystemGetDriverVersion(text, c_uint(80)) == 0
    return text.value.decode() if known else ""


def setting(uuid: str) -> dict[str, str]:
    """Return `driver` and `clocks` of a GPU, the clocks of SMs and memory that it may have: under others, timings differ."""
    library, handle = _library(), c_void_p()
    found = {"driver": driver_version()}
    if library is not None and library.nvmlDeviceGetHandleByUUID(c_char_p(uuid.encode()), byref(handle)) == 0:
        clocks = [_allowed_mhz(library, handle, which) for which in (_SM_CLOCK, _MEMORY_CLOCK)]
        found["clocks"] = "/".join(map(str, clocks)) + " MHz" if all(clocks) else ""
    return {name: value for name, value in found.items() if value}


def _allowed_mhz(library: ctypes.CDLL, handle: c_void_p, which: int) -> int | None:
    """Return the clock that applications are given, or the highest of GPUs on which that cannot be set."""
    return _number(library.nvmlDeviceGetApplicationsClock, handle, which) or _number(library.nvmlDeviceGetMaxClockInfo, handle, which)


def conditions(uuid: str) -> dict[str, Any]:
    """Return `sm_clock_hz`, `memory_clock_hz`, `slowed_by`, `temperature_c` and `power_w` of a GPU, as far as they are known."""
    library, handle = _library(), c_void_p()
    if library is None or library.nvmlDeviceGetHandleByUUID(c_char_p(uuid.encode()), byref(handle)) != 0:
        return {}
    reasons = c_ulonglong()
    known = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle, byref(reasons)) == 0
    slowed_by = [name for bit, name in _REASONS.items() if reasons.value & bit] if known else None
    found = {
        "sm_clock_hz": _scaled(_number(library.nvmlDeviceGetClockInfo, handle, _SM_CLOCK), 1e6),
        "memory_clock_hz": _scaled(_number(library.nvmlDeviceGetClockInfo, handle, _MEMORY_CLOCK), 1e6),
        "slowed_by": slowed_by,
        "temperature_c": _number(library.nvmlDeviceGetTemperature, handle, _GPU_TEMPERATURE),
        "power_w": _scaled(_number(library.nvmlDeviceGetPowerUsage, handle), 1e-3),
    }
    return {name: value for name, value in found.items() if value is not None}


def _number(function: Any, handle: c_void_p, *which: int) -> int | None:
    value = c_uint()
    return value.value if function(handle, *map(c_uint, which), byref(value)) == 0 else None


def _scaled(value: int | None, unit: float) -> float | None:
    return None if value is None else value * unit
