"""Owns the frozen values that the stages hand to one another.

Knows nothing of TOML, TVM, NumPy, files, devices or the order of the stages.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kerneldecl.errors import TuningError
from kerneldecl.limits import Budget
from kerneldecl.rows import Rows
from kerneldecl.signature import Arg as Arg  # noqa: PLC0414  rules have it from here
from kerneldecl.signature import Signature as Signature  # noqa: PLC0414
from kerneldecl.timing import DEFAULT_TIMING, Timings, median

Scalar = bool | int | float | str  # a value of TOML that is neither list nor table
Value = Scalar | tuple["Value", ...]
"""What an attribute or a parameter may hold; lists of TOML become tuples, so that every value is hashable."""


Options = tuple[tuple[str, Value], ...]  # of a tuner as they are declared, sorted by name
Policy = str | tuple[str | tuple[str, Options], ...]
"""What an entry's `policy` holds: a name, or several, alone or with options."""


class PolicyUse(NamedTuple):
    """One policy that an entry asks, and with what."""

    name: str
    options: Options = ()


def uses(policy: Policy) -> tuple[PolicyUse, ...]:
    """Return the policies that a declared one names, in order."""
    items = (policy,) if isinstance(policy, str) else policy
    return tuple(PolicyUse(item) if isinstance(item, str) else PolicyUse(*item) for item in items)


@dataclass(frozen=True)
class Workload:
    """One fully expanded entry of workloads.toml, for one target."""

    name: str
    """Name with the expanded attributes, without the target: `qkv_projection[m=16]`."""
    target: str
    rule: str
    attrs: tuple[tuple[str, Value], ...]
    """Every attribute of the rule, defaults filled in, sorted by name."""
    policy: Policy
    top_k: int
    tolerance: float | None
    """Relative error allowed, or None for the rule's own."""
    tags: tuple[str, ...]
    line: int
    """Line of the entry's table in workloads.toml, counted from 1."""
    generation: int = 0
    """Raised by hand to tune again what a record exists of."""
    specialize: str = ""
    """Path in the workspace of a file that gives functions of the user's own; empty where there is none."""
    nan: str = ""
    """ "ignore" where maxima and minima of NaN may be anything; empty where they are NaN."""
    budget: Budget = ()
    """What the whole search may take."""
    timing: str = DEFAULT_TIMING
    rows: Rows | None = None

    @property
    def nan_field(self) -> Mapping[str, str]:
        """Return what a request or a manifest holds of it: nothing where it is empty."""
        return {"nan": self.nan} if self.nan else {}

    @property
    def entry(self) -> str:
        return f"{self.name}@{self.target}"


@dataclass(frozen=True)
class Cpu:
    """What a policy may know of a CPU. Rates are of one core, and so are the sizes of L1 and L2."""

    cores: int
    vector_bytes: int
    """Width of the widest vector register that the target's code uses."""
    vector_registers: int
    fma_per_cycle: float
    """Fused multiply-adds of a full vector that one core starts in a cycle."""
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int
    """Size of the last-level cache; 0 where there is none."""
    line_bytes: int
    clock_hz: float
    l1_bytes_per_cycle: float
    l2_bytes_per_cycle: float
    l3_bytes_per_cycle: float
    dram_bytes_per_s: float
    """Rate of the whole socket, not of one core."""
    parallel_secs: float
    """Cost of starting and joining one parallel region."""

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the peak of all cores, counting a fused multiply-add as two operations."""
        lanes = self.vector_bytes // max(4, dtype_bytes(dtype))
        return self.cores * self.clock_hz * self.fma_per_cycle * 2 * lanes


Rates = tuple[tuple[str, float], ...]
"""Operations a second by dtype, sorted by dtype; pairs instead of a mapping, so that the value is hashable."""


@dataclass(frozen=True)
class Gpu:
    """What a policy may know of an NVIDIA GPU. Rates are of the whole GPU unless the name says otherwise."""

    compute_capability: tuple[int, int]
    sm_count: int
    warp_size: int
    max_threads_per_block: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    registers_per_sm: int
    """32-bit registers."""
    registers_per_block: int
    max_registers_per_thread: int
    register_allocation_unit: int
    """A warp is given its registers in multiples of so many."""
    smem_per_block_bytes: int
    """What any kernel may use."""
    smem_per_block_optin_bytes: int
    """What a kernel may use that asks for it."""
    smem_per_sm_bytes: int
    smem_reserved_per_block_bytes: int
    """What the system takes of an SM's shared memory for each resident block."""
    l2_bytes: int
    clock_hz: float
    """Boost clock: the highest that the vendor names."""
    dram_bytes_per_s: float
    l2_bytes_per_s: float
    """What kernels can be expected to read, not what the wires could carry."""
    smem_bytes_per_clock_per_sm: float
    simt_flops_per_s: Rates
    """Rates of the CUDA cores; a fused multiply-add counts as two, packed operations in full."""
    tensor_flops_per_s: Rates
    """Dense rates of the tensor cores by dtype of the operands, accumulators in float32 or int32; a dtype they do not take is absent."""
    async_copy: bool
    """Has cp.async, from global to shared memory past the registers."""
    ldmatrix: bool
    launch_secs: float
    """Least time of a kernel that follows another."""
    float16_accum_speedup: float = 1.0
    """How much faster tensor cores multiply float16 operands with float16 accumulators than with float32 ones."""
    wgmma_arch: str = ""
    """The compilers' name for the architecture with wgmma; empty where there is none."""

    def simt_rate(self, dtype: str) -> float:
        """Return the operations a second of the CUDA cores, 0 where nothing is known of the dtype."""
        return dict(self.simt_flops_per_s).get(dtype, 0.0)

    def tensor_rate(self, dtype: str) -> float:
        """Return the operations a second of the tensor cores, 0 where they do not take the dtype."""
        return dict(self.tensor_flops_per_s).get(dtype, 0.0)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the best that any unit does on the dtype; what is in no table is computed in float32."""
        return max(self.tensor_rate(dtype), self.simt_rate(dtype)) or self.simt_rate("float32")


@dataclass(frozen=True)
class Arch:
    """One GPU or CPU as data: what archs/*.toml holds, or what was detected for `host`."""

    name: str
    kind: Literal["cpu", "cuda"]
    model: str
    """The device's own name for itself; timings hold for this model alone. Empty: any device that runs the target."""
    tvm_target: tuple[tuple[str, Value], ...]
    """TVM's target dictionary, sorted by key."""
    cpu: Cpu | None = None
    gpu: Gpu | None = None
    is_detected: bool = False
    """True for `host`: records hold for one kind of machine and stay out of the lock."""
    cuda_min: str = ""
    """The first CUDA toolkit that compiles for it; empty for a CPU."""
    cuda_max: str = ""
    """The last one that does; empty where all newer ones do."""
    tvm_tags: tuple[str, ...] = ()
    """TVM's target tags that stand for it, such as "nvidia/nvidia-a100". Boards that differ in memory alone share one."""

    def __hash__(self) -> int:
        return hash((self.name, self.kind, self.model))  # of all figures it would take longer than the texts that are kept by arch

    def __post_init__(self) -> None:
        if (self.cpu is not None, self.gpu is not None) != (self.kind == "cpu", self.kind == "cuda"):
            raise ValueError(f"arch {self.name} is of kind {self.kind}; it must have {'cpu' if self.kind == 'cpu' else 'gpu'} alone")

    @property
    def device(self) -> Cpu | Gpu:
        """Return whichever of both is there."""
        device = self.cpu or self.gpu
        assert device is not None, "one of both is there"
        return device

    @property
    def the_cpu(self) -> Cpu:
        """Return the CPU, for code that is for CPUs alone; raise TuningError if this is a GPU."""
        if self.cpu is None:
            raise TuningError(f"arch {self.name} is a GPU, which policies and templates for CPUs know nothing of")
        return self.cpu

    @property
    def the_gpu(self) -> Gpu:
        """Return the GPU, for code that is for GPUs alone; raise TuningError if this is a CPU."""
        if self.gpu is None:
            raise TuningError(f"arch {self.name} is a CPU, which policies and templates for GPUs know nothing of")
        return self.gpu


@dataclass(frozen=True)
class Axis:
    """One loop of a computation."""

    name: str
    extent: int
    kind: Literal["spatial", "reduce"]


@dataclass(frozen=True)
class Access:
    """One operand as a block reads or writes it."""

    operand: str
    shape: tuple[int, ...]
    dtype: str
    """Spelled as in TVM, and "tfloat32" for a float32 that is read as TF32 (10-bit mantissa)."""
    index: tuple[tuple[tuple[int, int], ...] | None, ...]
    """Each dimension as a sum of coefficient x axis plus a constant: pairs of (axis position, coefficient). None where it is not affine."""


Condition = tuple[tuple[tuple[int, int], ...], int]
"""Terms as an `Access` has them, and a constant: their sum is not negative."""


@dataclass(frozen=True)
class Block:
    """One loop nest of a function: its axes, outermost first, and what it reads and writes."""

    name: str
    axes: tuple[Axis, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops_per_point: int
    """Arithmetic operations at one point of the iteration space; a fused multiply-add is two."""
    is_multiply_accumulate: bool = True
    """Whether a reduction adds, at each point, the product of two operands to one accumulator that starts at zero, and nothing else."""
    conditions: tuple[Condition, ...] = ()
    """What holds of the axes wherever the block's value depends on data: elsewhere it is a constant, such as padding or a mask."""

    @property
    def is_reduction(self) -> bool:
        return any(axis.kind == "reduce" for axis in self.axes)


@dataclass(frozen=True)
class IterSpace:
    """All that a policy may see of a computation: its blocks in order of execution, and which operands are arguments."""

    blocks: tuple[Block, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """Return what the first input is read as: the dtype that a peak of arithmetic is asked for."""
        reads = (read for block in self.blocks for read in block.reads)
        return next((read.dtype for read in reads if read.operand in self.inputs[:1]), "float32")


SPECIALIZE = "specialize"
"""A candidate with this name instead of a template's is a custom kernel; `variant` is its position among those that the file gives."""
FALLBACKS = frozenset({"cpu_fallback", "gpu_fallback"})
"""Templates that fit every function, and are tuned to none: their kernels may be many times slower than the hardware allows."""


@dataclass(frozen=True)
class Candidate:
    """A template's name with the parameters it is to be applied with."""

    template: str
    params: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, template: str, params: Mapping[str, Value]) -> Candidate:
        return cls(template, tuple(sorted(params.items())))

    @property
    def is_fallback(self) -> bool:
        return self.template in FALLBACKS

    def __str__(self) -> str:
        """Return the candidate in one line: `cpu_matmul(m=14 n=32)`."""
        return f"{self.template}({' '.join(f'{name}={shown_value(value)}' for name, value in self.params)})"

    def to_json(self) -> dict[str, object]:
        return {"template": self.template, "params": dict(self.params)}

    @classmethod
    def from_json(cls, json: Mapping[str, object]) -> Candidate:
        """Read what `to_json` wrote, also after a trip through a file; raise TypeError or KeyError otherwise."""
        params = json["params"]
        if not isinstance(params, Mapping) or not isinstance(json["template"], str):
            raise TypeError("a candidate is {'template': str, 'params': {…}}")
        return cls.of(json["template"], {str(name): frozen(value) for name, value in params.items()})


@dataclass(frozen=True)
class Proposal:
    """A candidate with the time that the policy's model expects of it."""

    candidate: Candidate
    predicted_secs: float


@dataclass(frozen=True)
class Trial:
    """What became of one candidate: how far it got, and its samples if it got to the end."""

    candidate: Candidate
    predicted_secs: float
    schedule_digest: str = ""
    """Digest of the scheduled module; empty if no schedule came about."""
    code_digest: str = ""
    """Digest of the generated code; empty if it was not built."""
    code_bytes: int = 0
    registers: int = 0
    """32-bit registers per thread of the kernel that uses most; 0 on CPUs, as the next two are."""
    smem_bytes: int = 0
    """Shared memory by each thread block, of the kernel that uses most."""
    spill_bytes: int = 0
    """Local memory per thread: spilled registers and arrays with variable indices."""
    error: float | None = None
    """Largest relative error against the reference; None if it never ran."""
    samples: tuple[float, ...] = ()
    """Seconds of one call each, by the protocol that winners are chosen by; empty unless the error is within the tolerance."""
    timings: Timings = ()
    is_traceless: bool = False
    """Whether no schedule's trace leads to the kernel."""
    failure: str = ""
    """Why there are no samples."""

    @functools.cached_property
    def run_secs(self) -> float:
        """Median of the samples."""
        return median(self.samples)


def shown_value(value: Value) -> str:
    """Return a parameter's value as people read it: `128x64` of a tuple, eight digits of a digest instead of a trace."""
    if isinstance(value, tuple):
        return "x".join(map(shown_value, value)) or "none"
    return hashlib.sha256(value.encode()).hexdigest()[:8] if isinstance(value, str) and len(value) > 80 else str(value).lower()


def frozen(value: object) -> Value:
    """Return a TOML or JSON value with every list turned into a tuple; raise TypeError for what is no Value."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item) for item in value)
    raise TypeError(f"{type(value).__name__} is not a value of an attribute")


@functools.cache
def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element: `dtype_bytes("float16") == 2`. Sub-byte dtypes count as one byte."""
    return 1 if dtype == "bool" else max(1, int("".join(c for c in dtype.partition("_")[0] if c.isdigit())) // 8)
