"""Owns the proposal of an arch file for a GPU that has none: the driver's properties, and rates by compute capability.

Knows nothing of how the driver is called or of where the file is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kerneldecl.hardware.cuda_driver import DriverGpu


@dataclass(frozen=True)
class _Generation:
    """Facts of a compute capability that no driver reports. Rates are operations per clock and SM; an FMA counts as two."""

    cuda_min: str
    simt: Mapping[str, int]
    tensor: Mapping[str, int]
    l2_slice_bytes: int
    """Bytes of L2 per slice; a slice transfers 64 bytes per clock."""


def _simt(float16: int, float32: int, float64: int, int32: int, bfloat16: int = 0) -> dict[str, int]:
    rates = {
        "bfloat16": bfloat16,
        "float16": float16,
        "float32": float32,
        "float64": float64,
        "int32": int32,
        "int8": int32,
        "uint8": int32,
    }
    return {dtype: rate for dtype, rate in rates.items() if rate}


def _integers(rate: int) -> dict[str, int]:
    return dict.fromkeys(("int8", "uint8"), rate)


def _tensor(float16: int, *, float8: bool = False, **others: int) -> dict[str, int]:
    """Return the rates of tensor cores since Ampere, which are multiples of the float16 rate."""
    rates = {"bfloat16": float16, "float16": float16, **_integers(2 * float16), "tfloat32": float16 // 2, **others}
    return rates | ({"float8_e4m3fn": 2 * float16, "float8_e5m2": 2 * float16} if float8 else {})


# CUDA-core rates: CUDA C++ Programming Guide, throughput of native arithmetic instructions. Tensor-core rates: NVIDIA's
# whitepapers of Turing, A100, GA102, Ada, H100 and RTX Blackwell, briefs of Jetson Orin and HGX B200. Toolkits: release notes.
# Slices of L2: A100 from NVIDIA's bytes per clock, the others from their memory controllers.
_GENERATIONS: Mapping[tuple[int, int], _Generation] = {
    (7, 5): _Generation("10.0", _simt(256, 128, 4, 128), {"float16": 1024, **_integers(2048)}, 256 << 10),
    (8, 0): _Generation("11.0", _simt(512, 128, 64, 128, 256), _tensor(2048, float64=128), 512 << 10),
    (8, 6): _Generation("11.1", _simt(256, 256, 4, 128, 256), _tensor(1024), 256 << 10),
    (8, 7): _Generation("11.4", _simt(256, 256, 4, 128, 256), _tensor(2048), 256 << 10),
    (8, 9): _Generation("11.8", _simt(256, 256, 4, 128, 256), _tensor(1024, float8=True), 2 << 20),
    (9, 0): _Generation("11.8", _simt(512, 256, 128, 128, 512), _tensor(4096, float8=True, float64=256), 640 << 10),
    (10, 0): _Generation("12.8", _simt(512, 256, 128, 128, 512), _tensor(8192, float8=True, float64=128), 810 << 10),
    (12, 0): _Generation("12.8", _simt(256, 256, 4, 256, 256), _tensor(1024, float8=True), 2 << 20),
}
_L2_SHARE = 0.75
"""Reached fraction of the slices' bandwidth: published microbenchmarks have 0.69 on V100, 0.78 on T4, 0.79 on A800."""
_LAUNCH_SECS = 2.0e-6
"""Launch latency, assumed: near the 1.5e-6 measured on an H200."""


def proposed_arch(gpu: DriverGpu) -> str:
    """Return the text of an arch file for the GPU."""
    return "\n".join(_lines(gpu)) + "\n"


def _lines(gpu: DriverGpu) -> Iterator[str]:
    capability = (gpu.compute_capability_major, gpu.compute_capability_minor)
    like = max((known for known in _GENERATIONS if known <= capability), default=min(_GENERATIONS))
    generation = _GENERATIONS[like]
    yield f"# {gpu.model}: proposed by `kerneldecl doctor --propose-arch`."
    yield "# Sizes, clocks and limits are the driver's; rates are those of the compute capability at the driver's clock."
    if like != capability:
        yield f"# Nothing is known of compute capability {_dotted(capability)}; rates and toolkits are those of {_dotted(like)}: check."
    yield 'kind = "cuda"'
    yield f"model = {json.dumps(gpu.model, ensure_ascii=False)}"
    yield f'cuda_min = "{generation.cuda_min}"'
    yield from _target_lines(gpu)
    yield from _limit_lines(gpu)
    yield from _speed_lines(gpu, capability, generation)
    clocks_per_s = gpu.clock_khz * 1e3 * gpu.sm_count
    yield from _rate_lines("simt", {dtype: rate * clocks_per_s for dtype, rate in generation.simt.items()})
    slowed = 0.5 if _is_slowed(gpu, capability) else 1.0
    tensor = {dtype: rate * clocks_per_s * (1.0 if dtype in _integers(1) else slowed) for dtype, rate in generation.tensor.items()}
    yield from _rate_lines("tensor", tensor)


def _target_lines(gpu: DriverGpu) -> Iterator[str]:
    yield from ("", "[tvm_target]", 'kind = "cuda"')
    yield f'arch = "sm_{gpu.compute_capability_major}{gpu.compute_capability_minor}"'
    yield f"max_threads_per_block = {gpu.max_threads_per_block}"
    yield f"thread_warp_size = {gpu.warp_size}"
    yield f"max_shared_memory_per_block = {gpu.smem_per_block_optin_bytes}"
    yield f"l2_cache_size_bytes = {gpu.l2_bytes}"


def _limit_lines(gpu: DriverGpu) -> Iterator[str]:
    yield from ("", "[gpu]")
    yield f"compute_capability = [{gpu.compute_capability_major}, {gpu.compute_capability_minor}]"
    yield f"sm_count = {gpu.sm_count}"
    yield f"warp_size = {gpu.warp_size}"
    yield f"max_threads_per_block = {gpu.max_threads_per_block}"
    yield f"max_threads_per_sm = {gpu.max_threads_per_sm}"
    yield f"max_blocks_per_sm = {gpu.max_blocks_per_sm}"
    yield f"registers_per_sm = {gpu.registers_per_sm}"
    yield f"registers_per_block = {gpu.registers_per_block}"
    yield "max_registers_per_thread = 255       # of every compute capability since 5.0"
    yield "register_allocation_unit = 256       # same"
    yield f"smem_per_block_bytes = {gpu.smem_per_block_bytes}"
    yield f"smem_per_block_optin_bytes = {gpu.smem_per_block_optin_bytes}"
    yield f"smem_per_sm_bytes = {gpu.smem_per_sm_bytes}"
    yield f"smem_reserved_per_block_bytes = {gpu.smem_reserved_per_block_bytes}"
    yield f"l2_bytes = {gpu.l2_bytes}"


def _speed_lines(gpu: DriverGpu, capability: tuple[int, int], generation: _Generation) -> Iterator[str]:
    clock_hz = gpu.clock_khz * 1e3
    dram = 2 * gpu.memory_clock_khz * 1e3 * gpu.memory_bus_bits / 8
    l2 = _L2_SHARE * 64 * gpu.l2_bytes / generation.l2_slice_bytes * clock_hz
    yield f"clock_hz = {clock_hz:.4e}"
    yield f"dram_bytes_per_s = {dram:.4e}         # two transfers a clock of the memory"
    yield f"l2_bytes_per_s = {l2:.4e}           # estimated: {_L2_SHARE} of 64 bytes a clock and slice"
    yield "smem_bytes_per_clock_per_sm = 128.0  # 32 banks of 4 bytes"
    yield f"async_copy = {json.dumps(capability >= (8, 0))}"
    yield f"ldmatrix = {json.dumps(capability >= (7, 5))}"
    yield f"launch_secs = {_LAUNCH_SECS:.1e}                # assumed"
    if _is_slowed(gpu, capability):
        yield "float16_accum_speedup = 2.0          # GeForce: tensor cores run at half the rate where accumulators are float32"
    if capability == (9, 0):
        yield 'wgmma_arch = "sm_90a"'


def _rate_lines(unit: str, rates: Mapping[str, float]) -> Iterator[str]:
    yield from ("", f"[gpu.{unit}_flops_per_s]")
    yield from (f"{dtype} = {rates[dtype]:.4e}" for dtype in sorted(rates))


def _is_slowed(gpu: DriverGpu, capability: tuple[int, int]) -> bool:
    return "GeForce" in gpu.model and capability >= (7, 5)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
