"""What nvcc lists is run without it where that is all that it does, and where no macro of a preprocessor is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kerneldecl.toolchain.nvcc_steps import Steps, compiled, steps_of, suits

PREPROCESS = 'gcc -std=c++17 -D__CUDA_ARCH__=900 -E -x c++ -O3 -w "-I/cuda/include" -U "GONE" -D "SAID" -include "cuda_runtime.h" -m64'
FRONT = '"$CICC_PATH/cicc" -arch compute_90 "kernel.cpp1.ii" -o "kernel.ptx"'
ASSEMBLE = 'ptxas -v "kernel.ptx" -o "kernel.out"'


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Provide a front end and an assembler that copy, and say so."""
    for name, script in {"cicc": 'cp "$3" "$5"', "ptxas": 'cp "$2" "$4"; echo "Used 1 registers, $SAID_TOO" >&2'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def listed(tools: Path, *commands: str) -> str:
    lines = (f"CICC_PATH={tools}", f"PATH={tools}:/usr/bin:/bin", "SAID_TOO=spills none ", *commands)
    return "".join(f"#$ {line} \n" for line in lines)


def found(tools: Path, preprocess: str = PREPROCESS) -> Steps | None:
    return steps_of(listed(tools, f'{preprocess} "kernel.cu" -o "kernel.cpp1.ii"', FRONT, ASSEMBLE))


def test_front_end_and_assembler_get_the_macros_that_the_preprocessor_gets(tools: Path) -> None:
    steps = found(tools)
    assert steps is not None
    assert steps.macros == "#define __CUDA_ARCH__ 900\n#undef GONE\n#define SAID 1\n"
    made = compiled(steps, "int x;\n")
    assert made == (f'{steps.macros}# 1 "kernel.cu"\nint x;\n'.encode(), "Used 1 registers, spills none\n")


def test_nothing_comes_of_a_step_that_fails(tools: Path) -> None:
    (tools / "ptxas").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    steps = found(tools)
    assert steps is not None
    assert compiled(steps, "int x;\n") is None


@pytest.mark.parametrize("option", ["-include other.h", "-traditional", "-fno-builtin", "-imacros m.h"])
def test_a_preprocessor_that_is_told_anything_else_is_left_to_nvcc(tools: Path, option: str) -> None:
    assert found(tools, f"{PREPROCESS} {option}") is None


def test_more_steps_or_missing_tools_are_left_to_nvcc(tools: Path) -> None:
    assert steps_of(listed(tools, FRONT, ASSEMBLE)) is None
    assert steps_of(listed(tools, f'{PREPROCESS} "kernel.cu" -o "kernel.cpp1.ii"', FRONT, ASSEMBLE, "fatbinary")) is None
    (tools / "ptxas").unlink()
    assert found(tools) is None


def test_conditions_on_macros_that_a_preprocessor_may_define_are_left_to_nvcc(tools: Path) -> None:
    steps = found(tools)
    assert steps is not None
    assert suits(steps, "#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900) || defined(_WIN32)\nint x;\n#endif\n")
    assert suits(steps, "#define __mine__\n  # ifdef __mine__\nint __GNUC__is_no_condition;\n#endif\n")
    assert not suits(steps, "#if SAID && \\\n  __GNUC__ > 3\n#endif\n")
    assert not suits(steps, "#elif __has_builtin(x)\n#endif\n")
