"""Owns pooling as tests of its templates make it: the rule, and its kernel's machine code.

Knows nothing of what is tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_program
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.rule import Rule
from kerneldecl.toolchain import nvcc
from support.compilers import compiled_cubin
from support.repository import REPOSITORY

H200 = load_arch(REPOSITORY, "h200")


def rule_of(**attrs: Any) -> Rule:
    return load_rule(REPOSITORY, "pool2d").of(REPOSITORY, attrs)


def cubin_of(template: ModuleType, attrs: Mapping[str, Any], params: Mapping[str, Value]) -> nvcc.Cubin:
    mod = template.apply(canonical.lower(rule_of(**attrs)), params, H200)
    assert mod is not None
    program = cuda_program(mod, H200, "kernel")
    return compiled_cubin(program.source, program.arch, program.flags)
