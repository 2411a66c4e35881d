"""Owns the tests of archs as data: their files, their part in keys, the toolkits that compile for them, proposals.

Knows nothing of TVM or of policies. Nothing here needs a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.compilers import needs_nvcc

import kerneldecl
from kerneldecl.cli import doctor
from kerneldecl.declare.document import declare
from kerneldecl.errors import DeclarationError, ExitCode, ToolchainError, TuningError
from kerneldecl.hardware.arch_file import read_arch
from kerneldecl.hardware.cuda_driver import DriverGpu, read_gpus
from kerneldecl.hardware.propose_arch import proposed_arch
from kerneldecl.model import Arch, Gpu
from kerneldecl.plugins.load import load_arch
from kerneldecl.serial import arch_from_json, to_json
from kerneldecl.store import keys
from kerneldecl.toolchain import cxx, nvcc
from kerneldecl.toolchain.versions import why_not_compiled

Write = Callable[[Mapping[str, str]], Path]

STANDARD = Path(kerneldecl.__file__).parent / "archs"
TOOLCHAIN = {"tvm": "1", "tvm_ffi": "1", "cuda": "13.0"}
# deviceQuery's output: clock, memory clock (kHz), width of the memory bus (bits).
CLOCKS = {
    "t4": (1590000, 5001000, 256),
    "a100-40gb": (1410000, 1215000, 5120),
    "a100-80gb": (1410000, 1593000, 5120),
    "a10": (1695000, 6251000, 384),
    "a30": (1440000, 1215000, 3072),
    "a40": (1740000, 7251000, 384),
    "l4": (2040000, 6251000, 192),
    "l40s": (2520000, 9001000, 384),
    "rtx-3090": (1695000, 9751000, 384),
    "rtx-4090": (2520000, 10501000, 384),
    "h100-pcie": (1755000, 1593000, 5120),
    "h100-sxm": (1980000, 2619000, 5120),
    "h200": (1980000, 3201000, 6144),
    "rtx-2080-ti": (1545000, 7000000, 352),
    "rtx-3080": (1710000, 9501000, 320),
    "rtx-4080": (2505000, 11201000, 256),
    "rtx-5090": (2407000, 14001000, 512),
    "a6000": (1800000, 8001000, 384),
    "h100-nvl": (1785000, 2619000, 6016),
    "gh200": (1980000, 2619000, 6144),
    "orin": (1301000, 3200000, 256),
    "b100": (1584000, 3996000, 7680),
    "b200": (1980000, 3996000, 7680),
}
GPUS = sorted(CLOCKS)
# CUDA cores per SM by major compute capability.
CORES = {7: 64, 8: 128, 9: 128, 10: 128, 12: 128}


def load(name: str) -> tuple[Arch, Gpu]:
    arch = load_arch(STANDARD, name)
    assert arch.gpu is not None
    return arch, arch.gpu


def test_the_table_above_names_every_standard_gpu() -> None:
    found = {file.stem for file in STANDARD.glob("*.toml") if load_arch(STANDARD, file.stem).kind == "cuda"}
    assert found == set(GPUS)


# Files


@pytest.mark.parametrize("name", GPUS)
def test_sizes_and_rates_of_a_gpu_are_plausible(name: str) -> None:
    _, gpu = load(name)
    assert gpu.smem_per_block_bytes <= gpu.smem_per_block_optin_bytes <= gpu.smem_per_sm_bytes - gpu.smem_reserved_per_block_bytes
    assert gpu.smem_per_sm_bytes < gpu.l2_bytes
    assert gpu.max_threads_per_block <= gpu.max_threads_per_sm
    assert gpu.max_threads_per_sm % gpu.warp_size == 0
    assert gpu.registers_per_block <= gpu.registers_per_sm
    smem_bytes_per_s = gpu.smem_bytes_per_clock_per_sm * gpu.sm_count * gpu.clock_hz
    assert gpu.dram_bytes_per_s < gpu.l2_bytes_per_s < smem_bytes_per_s
    assert all(rate >= gpu.simt_rate(dtype) for dtype, rate in gpu.tensor_flops_per_s)
    assert {"float16", "float32", "float64", "int8", "int32"} <= dict(gpu.simt_flops_per_s).keys()


@pytest.mark.parametrize("name", GPUS)
def test_peak_of_the_cuda_cores_is_that_of_their_number_and_clock(name: str) -> None:
    _, gpu = load(name)
    cores = 64 if gpu.compute_capability == (8, 0) else CORES[gpu.compute_capability[0]]
    assert gpu.simt_rate("float32") == pytest.approx(gpu.sm_count * cores * 2 * gpu.clock_hz, rel=0.05)


@pytest.mark.parametrize("name", GPUS)
def test_tensor_cores_do_a_power_of_two_of_operations_per_clock(name: str) -> None:
    """Catch a figure with sparsity, one of another board, a slipped digit."""
    _, gpu = load(name)
    # On Hopper and Blackwell, tensor cores are rated at a clock below that of CUDA cores: by 8 %, by 13 % on the H100 NVL.
    for dtype, rate in gpu.tensor_flops_per_s:
        per_clock = rate / gpu.sm_count / gpu.clock_hz
        nearest = min((2**power for power in range(6, 16)), key=lambda known: abs(known - per_clock))
        assert per_clock == pytest.approx(nearest, rel=0.14), dtype


def test_instructions_come_with_their_generations() -> None:
    by_capability = {gpu.compute_capability: gpu for gpu in (load(name)[1] for name in GPUS)}
    assert {c for c, gpu in by_capability.items() if gpu.ldmatrix} == {c for c in by_capability if c >= (7, 5)}
    assert {c for c, gpu in by_capability.items() if gpu.async_copy} == {c for c in by_capability if c >= (8, 0)}
    assert {c for c, gpu in by_capability.items() if gpu.wgmma_arch} == {(9, 0)}


@pytest.mark.parametrize("name", GPUS)
def test_every_number_of_a_standard_gpu_names_its_source(name: str) -> None:
    in_gpu = (STANDARD / f"{name}.toml").read_text(encoding="utf-8").partition("\n[gpu]\n")[2]
    bare = [line for line in in_gpu.splitlines() if "=" in line and not re.search(r"= [^#]+# \w", line)]
    assert not bare


def test_rates_of_a_dtype_that_no_table_has() -> None:
    _, gpu = load("t4")
    assert gpu.tensor_rate("bfloat16") == 0.0
    assert gpu.peak_flops_per_s("float16") == gpu.tensor_rate("float16") > gpu.simt_rate("float16")
    assert gpu.peak_flops_per_s("bfloat16") == gpu.simt_rate("float32")


# Values


def test_an_arch_is_a_cpu_or_a_gpu() -> None:
    gpu, cpu = load_arch(STANDARD, "h200"), load_arch(STANDARD, "x86-64-v3")
    with pytest.raises(ValueError, match="kind cuda; it must have gpu"):
        dataclasses.replace(gpu, cpu=cpu.cpu)
    with pytest.raises(ValueError, match="kind cpu; it must have cpu"):
        dataclasses.replace(cpu, cpu=None)
    assert (gpu.device, cpu.device) == (gpu.the_gpu, cpu.the_cpu)
    with pytest.raises(TuningError, match="arch h200 is a GPU"):
        _ = gpu.the_cpu
    with pytest.raises(TuningError, match="arch x86-64-v3 is a CPU"):
        _ = cpu.the_gpu


@pytest.mark.parametrize("name", ["h200", "t4", "x86-64-v3"])
def test_an_arch_survives_the_trip_through_json(name: str) -> None:
    arch = load_arch(STANDARD, name)
    read = arch_from_json(json.loads(json.dumps(to_json(arch))))
    assert read == arch
    assert hash(read) == hash(arch)


# Keys


def other(value: Any) -> Any:
    """Return a value of the same type with the smallest change."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return (*value[:-1], (value[-1][0], value[-1][1] * 2) if isinstance(value[-1], tuple) else value[-1] + 1)
    return value + 1


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Gpu)])
def test_what_is_proposed_depends_on_every_figure_of_a_gpu(field: str) -> None:
    arch, gpu = load("h200")
    changed = dataclasses.replace(arch, gpu=dataclasses.replace(gpu, **{field: other(getattr(gpu, field))}))
    manifests = [keys.propose_manifest("c", a, 20, {}) for a in (arch, changed)]
    ((name, old, new),) = keys.changed_lines(*manifests)
    assert name.startswith(f"arch.gpu.{field}")
    assert old != new
    assert keys.measure_manifest("code", arch, {}) == keys.measure_manifest("code", changed, {}), "times hold for a model of GPU"


def test_a_key_does_not_depend_on_toolkits_that_are_not_used() -> None:
    arch, _ = load("h200")
    changed = dataclasses.replace(arch, cuda_max="15.0", cuda_min="12.0")
    assert keys.tune_manifest("c", arch, {}, keys.Candidates(), TOOLCHAIN) == keys.tune_manifest(
        "c", changed, {}, keys.Candidates(), TOOLCHAIN
    )


def test_code_depends_on_the_target_and_what_launches_need_and_not_on_speed() -> None:
    arch, gpu = load("h200")
    faster = dataclasses.replace(arch, gpu=dataclasses.replace(gpu, clock_hz=2e9))
    without = dataclasses.replace(arch, gpu=dataclasses.replace(gpu, wgmma_arch=""))
    built = [keys.build_manifest("s", "kd_0", a, TOOLCHAIN) for a in (arch, faster, without)]
    assert built[0] == built[1] != built[2]
    # Launches spread blocks over SMs: H100s of both kinds have one target, and launches of their own.
    smaller = dataclasses.replace(arch, gpu=dataclasses.replace(gpu, sm_count=114))
    assert keys.build_manifest("s", "kd_0", smaller, TOOLCHAIN) != built[0]
    newer = keys.build_manifest("s", "kd_0", arch, {**TOOLCHAIN, "cuda": "13.1"})
    assert newer != built[0]


# Mistakes

MISTAKES = {
    "nearest name": ("sm_count = 132", "sm_counts = 132", 'unknown key "sm_counts"', 'did you mean "sm_count"?'),
    "missing": ("sm_count = 132", "", "key sm_count of [gpu] is missing", "`kerneldecl archs` names files to start from"),
    "zero": ("sm_count = 132", "sm_count = 0", "sm_count is 0; expected an integer above 0", ""),
    "fraction": ("warp_size = 32  ", "warp_size = 32.5  ", "warp_size is 32.5; expected an integer above 0", ""),
    "negative reserve": (
        "smem_reserved_per_block_bytes = 1024",
        "smem_reserved_per_block_bytes = -1",
        "smem_reserved_per_block_bytes is -1; expected an integer of at least 0",
        "",
    ),
    "text for a rate": ("launch_secs = 1.5e-6", 'launch_secs = "short"', 'launch_secs is "short"; expected a number above 0', ""),
    "text for a flag": ("ldmatrix = true", 'ldmatrix = "yes"', 'ldmatrix is "yes"; expected true or false', ""),
    "capability as a number": (
        "compute_capability = [9, 0]",
        "compute_capability = 9.0",
        "compute_capability is 9.0; expected two integers, such as [9, 0]",
        "",
    ),
    "rate of a dtype": ("float32 = 6.691e13", "float32 = 0", "expected a table of numbers above 0, such as {float32 = 6.7e13}", ""),
    "letter of an arch": ('arch = "sm_90" ', 'arch = "sm_90a" ', 'arch is "sm_90a"; [gpu] makes it "sm_90"', ""),
    "shared memory": (
        "max_shared_memory_per_block = 232448",
        "max_shared_memory_per_block = 49152",
        "max_shared_memory_per_block is 49152; [gpu] makes it 232448",
        "",
    ),
    "target without L2": ("l2_cache_size_bytes = 62914560", "", "key l2_cache_size_bytes of [tvm_target] is missing", ""),
    "toolkit as a number": ('cuda_min = "11.8"', "cuda_min = 11.8", 'cuda_min is 11.8; expected a version in quotes, such as "12.9"', ""),
    "tags as text": (
        'cuda_min = "11.8"',
        'tvm_tags = "nvidia/h200"\ncuda_min = "11.8"',
        'tvm_tags is "nvidia/h200"; expected a list of TVM\'s target tags, such as ["nvidia/nvidia-t4"]',
        "",
    ),
    "no toolkit": ('cuda_min = "11.8"', "", "key cuda_min is missing", ""),
    "kind": (
        'kind = "cuda"\nmodel',
        'kind = "cpu"\nmodel',
        'unknown key "gpu"; expected one of kind, model, tvm_target, cpu',
        'did you mean "cpu"?',
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_gpu_file_is_reported_with_its_line(mistake: str) -> None:
    old, new, sentence, hint = MISTAKES[mistake]
    text = (STANDARD / "h200.toml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    wrong = text.replace(old, new)
    with pytest.raises(DeclarationError, match=re.escape(sentence)) as caught:
        read_arch("h200", wrong.encode(), "archs/h200.toml")
    (problem,) = [problem for problem in caught.value.problems if sentence in problem.sentence]
    assert problem.hint == hint
    if new and "of [" not in sentence:
        # A table of rates is blamed as a whole: by its header's line.
        key = "[gpu.simt_flops_per_s]" if "table of numbers" in sentence else "[gpu" if mistake == "kind" else new.split(" =")[0]
        assert wrong.splitlines()[problem.line - 1].startswith(key)


@pytest.mark.parametrize(("kind", "wrong"), [("", "kind is missing"), ('kind = "gpu"\n', 'unknown kind "gpu"')])
def test_without_its_kind_nothing_else_is_said_of_a_file(kind: str, wrong: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        read_arch("mine", f'{kind}model = "Mine"\n'.encode(), "archs/mine.toml")
    assert [problem.sentence for problem in caught.value.problems] == [f"{wrong}; expected cpu, or cuda for a GPU"]


# Toolkits


OLD = (STANDARD / "t4.toml").read_text(encoding="utf-8").replace('cuda_min = "10.0"', 'cuda_min = "10.0"\ncuda_max = "12.9"')


def declared(arch: str, cuda: str | None) -> str:
    toolchain = f'[toolchain]\ncuda = "{cuda}"\n\n' if cuda else ""
    head = f'edition = 1\n\n[artifact]\nname = "ops"\nversion = "1"\n\n{toolchain}[target.old]\narch = "{arch}"\n\n'
    return f'{head}[[workload]]\nname = "a"\nrule = "matmul"\nm = 64\nn = 64\nk = 64\n'


@pytest.mark.parametrize(
    ("arch", "cuda", "sentence", "hint"),
    [
        ("old", None, "CUDA 13.0 does not compile for sm_75 of arch old any more", 'cuda = "12.9"'),
        ("old", "13.1.2", "CUDA 13.1.2 does not compile for sm_75 of arch old any more", 'cuda = "12.9"'),
        ("b200", "12.6", "CUDA 12.6 does not compile for sm_100 of arch b200 yet", 'cuda = "12.8" or newer'),
        ("h200", "9", "CUDA 9 does not compile for sm_90 of arch h200 yet", 'cuda = "11.8" or newer'),
        ("h200", "newest", 'cuda is "newest", no version', 'cuda = "13.0"'),
    ],
)
def test_a_target_that_the_toolkit_does_not_know_is_a_mistake(
    write_files: Write, arch: str, cuda: str | None, sentence: str, hint: str
) -> None:
    text = declared(arch, cuda)
    root = write_files({"workloads.toml": text, "archs/old.toml": OLD})
    with pytest.raises(DeclarationError, match=re.escape(sentence)) as caught:
        declare(root)
    (problem,) = caught.value.problems
    assert caught.value.exit_code == ExitCode.USAGE
    assert sentence in problem.sentence
    assert hint in problem.hint
    assert (problem.file, problem.entry) == ("workloads.toml", "[target.old]")
    assert text.splitlines()[problem.line - 1] == f'arch = "{arch}"'


@pytest.mark.parametrize(("arch", "cuda"), [("old", "12.9"), ("old", "12.9.1"), ("b200", None), ("h200", "11.8"), ("x86-64-v3", "9")])
def test_a_target_that_the_toolkit_knows_is_no_mistake(write_files: Write, arch: str, cuda: str | None) -> None:
    assert declare(write_files({"workloads.toml": declared(arch, cuda), "archs/old.toml": OLD})).targets == (("old", arch),)


def test_a_gpu_that_tvms_runtime_does_not_serve_is_a_mistake_of_its_file() -> None:
    text = (STANDARD / "t4.toml").read_text(encoding="utf-8").replace("compute_capability = [7, 5]", "compute_capability = [7, 0]")
    with pytest.raises(DeclarationError) as caught:
        read_arch("volta", text.replace('"sm_75"', '"sm_70"').encode(), "archs/volta.toml")
    (problem,) = caught.value.problems
    assert problem.sentence == "compute_capability is [7, 0]; TVM's CUDA runtime, made with CUDA 13, serves 7.5 and later"
    assert text.splitlines()[problem.line - 1].startswith("compute_capability")


@needs_nvcc
@pytest.mark.parametrize("name", GPUS)
def test_the_installed_toolkit_compiles_for_the_archs_that_the_files_claim(name: str) -> None:
    arch, gpu = load(name)
    found = nvcc.compiler()
    assert (why_not_compiled(arch, found.version)[0] == "") == ("sm_{}{}".format(*gpu.compute_capability) in found.archs)


# Proposals


def driver_gpu(name: str) -> DriverGpu:
    """Return a standard GPU as its driver would report it."""
    arch, gpu = load(name)
    clock_khz, memory_clock_khz, memory_bus_bits = CLOCKS[name]
    names = {field.name for field in dataclasses.fields(DriverGpu)} & {field.name for field in dataclasses.fields(Gpu)}
    return DriverGpu(
        model=arch.model,
        compute_capability_major=gpu.compute_capability[0],
        compute_capability_minor=gpu.compute_capability[1],
        clock_khz=clock_khz,
        memory_clock_khz=memory_clock_khz,
        memory_bus_bits=memory_bus_bits,
        **{field: getattr(gpu, field) for field in names},
    )


@pytest.mark.parametrize("name", GPUS)
def test_a_proposal_for_a_known_gpu_agrees_with_its_file(name: str) -> None:
    arch, gpu = load(name)
    proposed = read_arch(name, proposed_arch(driver_gpu(name)).encode(), "archs/new.toml")
    assert dataclasses.replace(proposed, gpu=gpu, tvm_tags=arch.tvm_tags) == arch
    for field in dataclasses.fields(Gpu):
        found, known = getattr(proposed.the_gpu, field.name), getattr(gpu, field.name)
        if field.type == "Rates":
            # Vendors rate tensor cores at a lower clock than the driver names.
            assert dict(found) == pytest.approx(dict(known), rel=0.16), field.name
        elif field.name != "launch_secs":
            assert found == (pytest.approx(known, rel=0.05) if isinstance(known, float) else known), field.name


def test_a_proposal_for_an_unknown_generation_names_the_one_that_it_is_based_on() -> None:
    ampere = dataclasses.replace(driver_gpu("a10"), model='NVIDIA "Next"', compute_capability_minor=8)
    text = proposed_arch(ampere)
    assert "Nothing is known of compute capability 8.8; rates and toolkits are those of 8.7" in text
    arch = read_arch("next", text.encode(), "archs/next.toml")
    assert (arch.model, dict(arch.tvm_target)["arch"], arch.the_gpu.compute_capability) == ('NVIDIA "Next"', "sm_88", (8, 8))
    assert "Nothing is known" not in proposed_arch(driver_gpu("a10"))


def test_a_gpu_without_an_arch_is_something_to_do(monkeypatch: pytest.MonkeyPatch, write_files: Write) -> None:
    assert doctor.unknown_models(["NVIDIA H200"], {"NVIDIA H200"}) == ""
    assert "no arch is for NVIDIA H800: kerneldecl doctor --propose-arch" in doctor.unknown_models(["NVIDIA H800"] * 8, {"NVIDIA H200"})
    known, new = driver_gpu("h200"), dataclasses.replace(driver_gpu("h100-sxm"), model="NVIDIA H800")
    monkeypatch.setattr(doctor, "read_gpus", lambda: (known, new))
    root = write_files({"archs/broken.toml": "kind ="})
    assert 'model = "NVIDIA H800"' in doctor.proposal(root)
    (root / "archs" / "h800.toml").write_text(doctor.proposal(root), encoding="utf-8")
    assert load_arch(root, "h800").model == "NVIDIA H800"
    assert 'model = "NVIDIA H200"' in doctor.proposal(root), "both are known now: the first"
    monkeypatch.setattr(doctor, "read_gpus", tuple)
    with pytest.raises(ToolchainError, match="shows no GPU"):
        doctor.proposal(root)


# The driver

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return STATUS; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 10; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, device == 10 ? "First" : "Second", size); return 0; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuDeviceGetPCIBusId(char *id, int size, int device) { strncpy(id, device == 10 ? "0000:1A:00.0" : "0000:1B:00.0", size); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1000 * device + attribute; return 0; }
"""


def stub_driver(folder: Path, status: int) -> str:
    source, library = folder / "driver.c", folder / f"libcuda{status}.so"
    source.write_text(DRIVER, encoding="utf-8")
    subprocess.run([cxx.compiler(), "-x", "c", f"-DSTATUS={status}", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_each_gpu_is_read_from_the_driver(tmp_path: Path) -> None:
    first, second = read_gpus(stub_driver(tmp_path, 0))
    assert (first.model, second.model) == ("First", "Second")
    assert second.uuid == "GPU-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"
    assert (second.short_uuid, second.pci) == ("GPU-0b0b0b0b", "0000:1b:00.0")
    header = {"sm_count": 16, "smem_per_block_optin_bytes": 97, "l2_bytes": 38, "memory_bus_bits": 37, "compute_capability_minor": 76}
    assert {name: getattr(first, name) - 10000 for name in header} == header
    assert {name: getattr(second, name) - 11000 for name in header} == header


def test_a_driver_that_is_missing_or_fails(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="no NVIDIA driver here"):
        read_gpus(str(tmp_path / "libcuda.so.1"))
    assert read_gpus(stub_driver(tmp_path, 100)) == (), "a driver without a GPU"
    with pytest.raises(ToolchainError, match="cuInit fails with CUDA error 999"):
        read_gpus(stub_driver(tmp_path, 999))
