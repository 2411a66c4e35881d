"""Owns the export of a model that calls kernels, its loading with the artifact that has them, and the exchange of the artifact.

Knows nothing of compiling: TVM's runtime is enough, and for linking kernels into the model a C++ compiler.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm.runtime.vm import VirtualMachine

from kerneldecl.artifact.load import checked_artifact, load
from kerneldecl.artifact.model_library import link_model
from kerneldecl.errors import ArtifactError

_KERNEL = re.compile(r"\bkd_[0-9a-f]{20}\b")


class Model:
    """A compiled model with the kernels of an artifact: `model["main"](*tensors)`."""

    def __init__(self, library: Path, artifact: str | Path | None, device: Any) -> None:
        self._library, self._device = library, device
        self._machine = _machine(library, artifact, device)

    def __getitem__(self, function: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self._machine[function]
        return found

    def replace_kernels(self, artifact: str | Path) -> None:
        """Use another artifact's kernels from now on; where it lacks one, raise ArtifactError and keep the present ones.

        Functions obtained from the model before, and the model's state, keep the old kernels.
        """
        self._machine = _machine(self._library, artifact, self._device)


def export_model(executable: Any, library: str | Path, artifact: str | Path | None = None) -> None:
    """Export what `relax.build` returned; with an artifact, link those of its kernels that the model calls into the library.

    Raise ArtifactError where the artifact is damaged or lacks a kernel that the model calls.
    """
    if artifact is None:
        executable.export_library(str(library))
        return
    folder, manifest = checked_artifact(artifact)
    called = _called(executable)
    _check_all(called, {entry["symbol"] for entry in manifest["entries"]}, folder)
    kernels = [folder / "objects" / f"{symbol}.o" for symbol in called]
    if manifest["arch"]["kind"] == "cpu":
        executable.export_library(str(library), addons=[str(kernel) for kernel in kernels])
    else:
        executable.export_library(str(library), fcompile=functools.partial(link_model, kernels=kernels))


def load_model(library: str | Path, artifact: str | Path | None = None, device: Any = None) -> Model:
    """Load an exported model, beside the artifact whose kernels it calls; on the CPU unless another device is given.

    Raise ArtifactError where the artifact is damaged, lacks a kernel that the model calls, or is not needed because the
    kernels are linked in.
    """
    return Model(Path(library).resolve(), artifact, device or tvm.cpu())


def _machine(library: Path, artifact: str | Path | None, device: Any) -> Any:
    module = tvm.runtime.load_module(str(library))
    called = _called(module)
    linked_in = {symbol for symbol in called if module.implements_function(symbol, query_imports=True)}
    if artifact is None:
        _check_all(called, linked_in, library)
    elif linked_in:
        raise ArtifactError(f"{library.name} has its kernels linked in and cannot use others; load it without an artifact")
    else:
        kernels = load(artifact)
        _check_all(called, {entry["symbol"] for entry in kernels.manifest["entries"]}, kernels.folder)
        module.import_module(kernels.library)
    return VirtualMachine(module, device)


def _called(executable: Any) -> list[str]:
    """Return the symbols of the kernels that a model calls, from the list of functions that its executable looks up."""
    return sorted(set(_KERNEL.findall(executable["stats"]().partition("Globals")[2])))


def _check_all(called: Sequence[str], there: Collection[str], place: Path) -> None:
    if missing := [symbol for symbol in called if symbol not in there]:
        raise ArtifactError(
            f"the model calls {', '.join(missing)}, which {place} does not have; compile or load it with the artifact that does"
        )
