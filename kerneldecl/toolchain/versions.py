"""Owns tool versions: the defaults of `[toolchain]`, the installed versions, and which CUDA toolkits compile for an arch.

Knows nothing of what happens when a tool is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from kerneldecl.model import Arch

PINS: Mapping[str, str] = MappingProxyType({"tvm": "0.27.0.post1", "tvm_ffi": "0.1.14.post1", "cuda": "13.0"})
_RELEASE = re.compile(r"(\d+)(?:\.(\d+))?(?:\.\d+)*")
PACKAGES: Mapping[str, str] = MappingProxyType({"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"})
"""The Python package of each tool that is one."""


def installed(package: str) -> str:
    """Return the version of an installed package, empty where it is not installed."""
    from importlib import metadata  # slow to import, and needed by builds only

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def cuda_release(version: str) -> tuple[int, int] | None:
    """Return major and minor of a CUDA version, `13.0` as well as `13.0.88`; None for anything else."""
    found = _RELEASE.fullmatch(version)
    return (int(found[1]), int(found[2] or 0)) if found else None


def is_cuda(found: str, declared: str) -> bool:
    """Say whether a compiler's version is the declared one: a declared 13.0 takes any of its patch releases, 13.0.88 only itself."""
    is_release = len(declared.split(".")) <= 2
    return found == declared or (is_release and cuda_release(found) == cuda_release(declared))


def why_not_compiled(arch: Arch, cuda: str) -> tuple[str, str]:
    """Return the reason and a hint if a CUDA toolkit does not compile for the arch; both empty if it does, or if the arch is a CPU."""
    if arch.gpu is None:
        return "", ""
    release, first, last = cuda_release(cuda), cuda_release(arch.cuda_min), cuda_release(arch.cuda_max)
    name = dict(arch.tvm_target).get("arch")
    if release is None:
        return f'cuda is "{cuda}", no version; cannot tell whether it compiles for {name}', 'expected such as cuda = "13.0"'
    if last and release > last:
        hint = f'the newest toolkit that does is {arch.cuda_max}: write cuda = "{arch.cuda_max}" under [toolchain]'
        return f"CUDA {cuda} does not compile for {name} of arch {arch.name} any more", hint
    if first and release < first:
        hint = f'the first toolkit that does is {arch.cuda_min}: write cuda = "{arch.cuda_min}" or newer under [toolchain]'
        return f"CUDA {cuda} does not compile for {name} of arch {arch.name} yet", hint
    return "", ""
