"""Owns the properties of this machine's GPUs as the NVIDIA driver reports them.

Knows nothing of archs. Calls libcuda: nvidia-smi reports neither the size of shared memory nor that of L2.
"""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass

from kerneldecl.errors import ToolchainError

LIBRARY = "libcuda.so.1"
_NAME_BYTES = 256
_NO_DEVICE = 100
SHORT_UUID = len("GPU-") + 8
_PCI_BYTES = 16
# CUdevice_attribute in cuda.h.
_ATTRIBUTES = {
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "sm_count": 16,
    "warp_size": 10,
    "max_threads_per_block": 1,
    "max_threads_per_sm": 39,
    "max_blocks_per_sm": 106,
    "registers_per_sm": 82,
    "registers_per_block": 12,
    "smem_per_block_bytes": 8,
    "smem_per_block_optin_bytes": 97,
    "smem_per_sm_bytes": 81,
    "smem_reserved_per_block_bytes": 111,
    "l2_bytes": 38,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
}


@dataclass(frozen=True)
class DriverGpu:
    """One GPU as the driver describes it."""

    model: str
    compute_capability_major: int
    compute_capability_minor: int
    sm_count: int
    warp_size: int
    max_threads_per_block: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    registers_per_sm: int
    registers_per_block: int
    smem_per_block_bytes: int
    smem_per_block_optin_bytes: int
    smem_per_sm_bytes: int
    smem_reserved_per_block_bytes: int
    l2_bytes: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    uuid: str = ""
    """UUID as in CUDA_VISIBLE_DEVICES and nvidia-smi."""
    pci: str = ""
    """Domain, bus, device and function, such as 0000:1b:00.0."""

    @property
    def short_uuid(self) -> str:
        """Enough of the UUID to tell this machine's GPUs apart, and for CUDA_VISIBLE_DEVICES; the whole is a serial number."""
        return self.uuid[:SHORT_UUID]


def open_driver(library: str = LIBRARY) -> ctypes.CDLL:
    """Return the driver's library; raise ToolchainError where there is none."""
    try:
        return ctypes.CDLL(library)
    except OSError:
        raise ToolchainError(f"no NVIDIA driver here: {library} is not found") from None


def read_gpus(library: str = LIBRARY) -> tuple[DriverGpu, ...]:
    """Return the GPUs that the driver shows to this process; raise ToolchainError where there is no driver that works."""
    driver = open_driver(library)
    if driver.cuInit(0) == _NO_DEVICE:
        return ()
    _call(driver, "cuInit", 0)
    count = ctypes.c_int()
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    return tuple(_gpu(driver, ordinal) for ordinal in range(count.value))


def _gpu(driver: ctypes.CDLL, ordinal: int) -> DriverGpu:
    device, value, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    _call(driver, "cuDeviceGet", ctypes.byref(device), ordinal)
    _call(driver, "cuDeviceGetName", name, _NAME_BYTES, device)
    values: dict[str, int] = {}
    for field, attribute in _ATTRIBUTES.items():
        _call(driver, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        values[field] = value.value
    return DriverGpu(name.value.decode(), **values, uuid=_uuid(driver, device), pci=_pci(driver, device))


def _uuid(driver: ctypes.CDLL, device: ctypes.c_int) -> str:
    content = ctypes.create_string_buffer(16)
    _call(driver, "cuDeviceGetUuid", content, device)
    return f"GPU-{uuid.UUID(bytes=content.raw)}"


def _pci(driver: ctypes.CDLL, device: ctypes.c_int) -> str:
    text = ctypes.create_string_buffer(_PCI_BYTES)
    _call(driver, "cuDeviceGetPCIBusId", text, _PCI_BYTES, device)
    return text.value.decode().lower()


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(driver, function)(*arguments)
    if status != 0:
        raise ToolchainError(f"the NVIDIA driver is there but {function} fails with CUDA error {status}")
