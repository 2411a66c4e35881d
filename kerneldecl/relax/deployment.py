"""Owns running an exported model beside the artifact whose kernels it calls, and exchanging the artifact.

Knows nothing of compiling: TVM's runtime is enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm
from tvm.runtime.vm import VirtualMachine

from kerneldecl.artifact import load
from kerneldecl.errors import ArtifactError

_KERNEL = re.compile(r"\bkd_[0-9a-f]{20}\b")


class Model:
    """A compiled model with the kernels of an artifact: `model["main"](*tensors)`."""

    def __init__(self, library: Path, artifact: str | Path, device: Any) -> None:
        self._library, self._device = library, device
        self._machine = _machine(library, artifact, device)

    def __getitem__(self, function: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self._machine[function]
        return found

    def replace_kernels(self, artifact: str | Path) -> None:
        """Take the kernels from another artifact from now on; where it lacks one, raise ArtifactError and keep the present ones.

        Functions that were taken out of the model before, and the model's state, stay with the old kernels.
        """
        self._machine = _machine(self._library, artifact, self._device)


def load_model(library: str | Path, artifact: str | Path, device: Any = None) -> Model:
    """Load a model that was compiled in mode "binary" and exported, beside an artifact; on the CPU unless another device is given.

    Raise ArtifactError where the artifact is damaged or lacks a kernel that the model calls.
    """
    return Model(Path(library).resolve(), artifact, device or tvm.cpu())


def _machine(library: Path, artifact: str | Path, device: Any) -> Any:
    kernels = load(artifact)
    module = tvm.runtime.load_module(str(library))
    module.import_module(kernels.library)
    try:
        return VirtualMachine(module, device)
    except tvm.error.InternalError as error:
        if missing := _KERNEL.search(str(error)):
            raise ArtifactError(
                f"{library.name} calls kernel {missing[0]}, which {kernels.folder} does not have; compile the model with this artifact"
            ) from None
        raise
