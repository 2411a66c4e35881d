"""Owns the export of a model that calls kernels, its loading with the artifact and the weights it needs, and the artifact's exchange.

Knows nothing of compiling: TVM's runtime is enough, and for linking kernels into the model a C++ compiler.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm
from tvm.runtime.vm import VirtualMachine
from tvm.support import cc

from kerneldecl.artifact.archive import ARCHIVE, unpack_objects
from kerneldecl.artifact.kernels import offer_vendor_libraries
from kerneldecl.artifact.load import checked_artifact, load
from kerneldecl.artifact.manifest import symbols_of, with_called
from kerneldecl.artifact.model_library import link_model
from kerneldecl.artifact.thread_pool import leave_unbound, set_threads
from kerneldecl.errors import ArtifactError
from kerneldecl.relax.bound_model import BoundModel
from kerneldecl.relax.signature import WEIGHTS_DIGEST, weights_path
from kerneldecl.relax.weights_file import write_weights
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.toolchain.companions import vendor_sources
from kerneldecl.toolchain.cxx import compiler

if TYPE_CHECKING:
    from kerneldecl.relax.detach_weights import Weights

_KERNEL = re.compile(r"\bkd_[0-9a-f]{20}\b")


class Model:
    """A compiled model with the kernels of an artifact: `model["main"](*tensors)`."""

    def __init__(self, library: Path, artifact: str | Path | None, device: Any) -> None:
        self._library, self._device = library, device
        self._bound = BoundModel(_machine(library, artifact, device), library, device)

    def __getitem__(self, function: str) -> Callable[..., Any]:
        """Return a function; called with tensors that do not fit, it raises ValueError with the signature."""
        return self._bound[function]

    @property
    def signatures(self) -> dict[str, Any]:
        """Names, shapes and dtypes of each function's inputs and outputs; empty for a model that was compiled without `pipeline`."""
        return self._bound.signatures

    @property
    def device(self) -> Any:
        """The device that the model runs on."""
        return self._device

    @property
    def device_kind(self) -> str:
        """The kind of device that the model was compiled for, "cpu" or "cuda"; empty where it does not say."""
        return self._bound.device_kind

    def instrument(self, hook: Callable[..., Any]) -> None:
        """Have TVM's virtual machine call `hook(function, name, is_before, result, *arguments)` around each function that it calls."""
        self._bound.instrument(hook)

    def replace_kernels(self, artifact: str | Path) -> None:
        """Use another artifact's kernels from now on; where it lacks one, raise ArtifactError and keep the present ones.

        Functions obtained from the model before, and the model's state, keep the old kernels.
        """
        self._bound = self._bound.on(_machine(self._library, artifact, self._device))


def export_model(executable: Any, library: str | Path, artifact: str | Path | None = None, weights: Weights | None = None) -> None:
    """Export what `relax.build` returned; with an artifact, link those of its kernels that the model calls into the library.

    `weights` are those that the pipeline has taken out of the model. They go into a file beside the library, from which `load_model`
    maps them: `model.weights.safetensors` beside `model.so`. Raise ArtifactError where the artifact is damaged or lacks a kernel
    that the model calls.
    """
    library = Path(library)
    # Under another name first: a process that has the old library open must not see the new one's bytes in its pages.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".kerneldecl-") as folder:
        made = Path(folder) / library.name
        _export_library(executable, made, artifact)
        if weights and weights.named:
            write_weights(weights_path(library), weights.named, {WEIGHTS_DIGEST: weights.digest})
        made.replace(library)


def _export_library(executable: Any, library: Path, artifact: str | Path | None) -> None:
    if artifact is None:
        executable.export_library(str(library), fcompile=_packing_objects(_link_with_vendor_calls))
        return
    folder, manifest = checked_artifact(artifact)
    called = _called(executable)
    _check_all(called, symbols_of(manifest), folder)
    with scratch_folder() as scratch:
        kernels = unpack_objects(folder / ARCHIVE, with_called(manifest, called), scratch)
        if manifest["arch"]["kind"] == "cpu":
            executable.export_library(
                str(library), fcompile=_packing_objects(_link_with_vendor_calls), addons=[str(kernel) for kernel in kernels]
            )
        else:
            executable.export_library(str(library), fcompile=_packing_objects(functools.partial(link_model, kernels=kernels)))


def _packing_objects(link: Callable[..., None]) -> Callable[..., None]:
    """Return a linker that has TVM write a model's constants into an object by LLVM.

    TVM writes C where it knows no triple, as of a model without host functions: 400 MB of weights keep the compiler busy for minutes.
    """
    packing = functools.partial(link)
    packing.get_target_triple = cc.get_target_by_dump_machine(compiler())  # type: ignore[attr-defined]
    return packing


def _link_with_vendor_calls(library: str, files: Sequence[str], options: Sequence[str] | None = None, **others: Any) -> None:
    """Link a model as TVM does, with the calls of vendors' libraries that it or its kernels make."""
    objects = [Path(name) for name in files if name.endswith(".o")]
    cc.create_shared(library, [*files, *vendor_sources(objects)], options, **others)


def load_model(library: str | Path, artifact: str | Path | None = None, device: Any = None) -> Model:
    """Load an exported model, beside the artifact whose kernels it calls; on the CPU unless another device is given.

    Raise ArtifactError where the artifact is damaged, lacks a kernel that the model calls, or is not needed because the
    kernels are linked in.
    """
    return Model(Path(library).resolve(), artifact, device or tvm.cpu())


def _machine(library: Path, artifact: str | Path | None, device: Any) -> Any:
    module = _private_copy(library)
    called = _called(module)
    linked_in = {symbol for symbol in called if module.implements_function(symbol, query_imports=True)}
    if artifact is None:
        _check_all(called, linked_in, library)
    elif linked_in:
        raise ArtifactError(f"{library.name} has its kernels linked in and cannot use others; load it without an artifact")
    else:
        kernels = load(artifact)
        _check_all(called, symbols_of(kernels.manifest), kernels.folder)
        module.import_module(kernels.library)
    offer_vendor_libraries()
    leave_unbound()
    set_threads(len(os.sched_getaffinity(0)))  # unless the artifact has chosen
    return VirtualMachine(module, device)


_WRITES = "`kerneldecl compile` writes one"


def _private_copy(library: Path) -> Any:
    """Load a copy of a library that this model alone uses.

    The dynamic linker returns what it has loaded from a path before, also where the file is another one by now, and TVM keeps in each
    library a pointer to the module that was loaded last, whichever it is that a kernel is called in. Nor may pages change under a
    running model when somebody writes over the file.
    """
    if not library.is_file():
        raise ArtifactError(f"{library}: no such file; export_model writes one")
    if library.suffix != ".so":
        raise ArtifactError(f"{library.name} is no compiled model by its name, MODEL.so; {_WRITES}")
    with scratch_folder() as folder:
        copy = Path(shutil.copyfile(library, folder / library.name))
        try:
            module = tvm.runtime.load_module(str(copy))
        except RuntimeError as error:
            (*_, reason) = str(error).strip().splitlines() or [""]
            raise ArtifactError(f"{library.name} is no compiled model: {reason.rpartition(f'{copy}: ')[2]}; {_WRITES}") from error
    if not module.implements_function("stats", query_imports=True):
        raise ArtifactError(f"{library.name} is a library that holds no model; {_WRITES}")
    return module


def _called(executable: Any) -> list[str]:
    """Return the symbols of the kernels that a model calls, from the list of functions that its executable looks up."""
    return sorted(set(_KERNEL.findall(executable["stats"]().partition("Globals")[2])))


def _check_all(called: Sequence[str], there: Collection[str], place: Path) -> None:
    if missing := [symbol for symbol in called if symbol not in there]:
        raise ArtifactError(
            f"the model calls {', '.join(missing)}, which {place} does not have; compile or load it with the artifact that does"
        )
