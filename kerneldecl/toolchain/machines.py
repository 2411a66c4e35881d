"""Owns which machine's instructions code for a CPU has: an arch's, an object's, this machine's, by the names of `uname -m`.

Knows nothing of compilers or of what the code computes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from kerneldecl.model import Arch

_ELF_MACHINES: Mapping[int, str] = MappingProxyType({62: "x86_64", 183: "aarch64", 243: "riscv64"})
"""Field e_machine of ELF's header (System V ABI, the processors' supplements)."""
_MACHINE_OFFSET = 18


def here() -> str:
    """Return this machine's name."""
    return os.uname().machine


def machine_of(arch: Arch) -> str:
    """Return the machine that runs the host code of an arch: that of its target's triple, this one where it has none."""
    return machine_of_triple(str(dict(arch.tvm_target).get("mtriple", "")))


def machine_of_triple(triple: str) -> str:
    """Return the machine of a triple such as aarch64-linux-gnu; this one of an empty triple."""
    return triple.partition("-")[0] or here()


def machine_of_object(content: bytes) -> str:
    """Return the machine of an ELF file's code; this one of anything else, which the linker will refuse."""
    number = int.from_bytes(content[_MACHINE_OFFSET : _MACHINE_OFFSET + 2], "little")
    return _ELF_MACHINES.get(number, here())
