"""Lines of TVM's database are those that TVM has written whole: it does not look whether it could."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tvm

from kerneldecl.compiler import canonical, cpu
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch, load_rule


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """Have no file of this process get longer, as on a full disk: what is written beyond that fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_database_that_tvm_could_not_write_is_an_error_and_no_shorter_one() -> None:
    mod = canonical.lower(load_rule(STANDARD, "matmul")(m=16, n=32, k=16))
    arch = load_arch(STANDARD, "x86-64-v3")
    lines = cpu.database_lines(tvm.s_tir.Schedule(mod), mod, arch).workloads
    assert len(lines) == 2
    for count in (100, len(lines[0]) + 100, len(lines[0]) + len(lines[1])):
        with files_of_at_most(count), pytest.raises(OSError, match="No space left on device"):
            cpu.database_lines(tvm.s_tir.Schedule(mod), mod, arch)
