"""What is detected of a machine of aarch64, as /proc and /sys of such machines have it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kerneldecl.hardware import host
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch

GRAVITON2 = """\
processor\t: {at}
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: {part}
CPU revision\t: 1
"""


@pytest.fixture
def arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this machine be one of aarch64; return the file that says which."""
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "arm", "6.1", "#1", "aarch64")))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for name in ("CPUINFO", "CACHES", "MAX_CLOCK", "QUOTA"):
        monkeypatch.setattr(host, name, tmp_path / name)
    return tmp_path / "CPUINFO"


def test_a_known_core_gets_its_processor_and_its_rate(arm: Path) -> None:
    arm.write_text("\n".join(GRAVITON2.format(at=at, part="0xd0c") for at in range(2)), encoding="utf-8")
    found = host.detect()
    assert dict(found.tvm_target) == {"kind": "llvm", "mcpu": "neoverse-n1", "num-cores": 2}
    assert (found.the_cpu.cores, found.the_cpu.vector_bytes, found.the_cpu.vector_registers) == (2, 16, 32)
    assert found.the_cpu.fma_per_cycle == 2.0
    assert found.the_cpu.clock_hz > 1e9, "BogoMIPS are those of a timer there"
    assert why_not_measured_here(load_arch(STANDARD, "neoverse-n1")) == ""
    assert why_not_measured_here(load_arch(STANDARD, "neoverse-v2")).startswith("it must be measured on Neoverse-V2")
    assert why_not_measured_here(load_arch(STANDARD, "x86-64-v3")) == "it must be measured on x86_64; this machine is aarch64"


def test_an_unknown_core_is_taken_for_any_of_its_machine(arm: Path) -> None:
    arm.write_text(GRAVITON2.format(at=0, part="0xfff"), encoding="utf-8")
    found = host.detect()
    assert "mcpu" not in dict(found.tvm_target)
    assert found.model == "aarch64 (0x41-0xfff)"
    assert host.runs("generic", "aarch64-linux-gnu")
    assert not host.runs("generic", "x86_64-linux-gnu")


@pytest.mark.parametrize(
    ("model", "flags", "processor", "attributes"),
    [
        (0x6A, "avx2 avx512bw avx512_vnni", "icelake-server", (host.NO_SCATTER,)),
        (0x6A, "avx2 avx512bw", "x86-64-v4", (host.NO_SCATTER,)),
        (0xA7, "avx2 avx512bw avx512_vnni", "x86-64-v4", ("+avx512vnni", host.NO_SCATTER)),
        (0x8F, "avx2 avx512bw avx512_vnni avx512_bf16", "sapphirerapids", (host.NO_SCATTER,)),
        (0x8F, "avx2 avx512bw avx512_vnni", "x86-64-v4", ("+avx512vnni", host.NO_SCATTER)),
    ],
    ids=["its kind has those of bytes", "a hypervisor hides them", "it is known by its level alone", "of bfloat16 too", "those are hidden"],
)
def test_dot_products_are_in_the_target_where_the_cpu_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: int, flags: str, processor: str, attributes: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "intel", "6.1", "#1", "x86_64")))
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    text = f"processor : 0\nvendor_id : GenuineIntel\ncpu family : 6\nmodel : {model}\nflags : {flags}\n"
    host.CPUINFO.write_text(text, encoding="utf-8")
    target = dict(host.detect().tvm_target)
    assert (target["mcpu"], target["mattr"]) == (processor, attributes)
