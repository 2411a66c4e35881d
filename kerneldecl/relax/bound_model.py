"""Owns a loaded model's functions: each bound to its weights, and refusing arguments that do not fit with one sentence.

Knows nothing of artifacts or of how libraries are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.artifact.kernels import tensor
from kerneldecl.errors import ArtifactError
from kerneldecl.relax.signature import BIND, SIGNATURE, WEIGHTS_DIGEST, misfit, weights_path
from kerneldecl.relax.weights_file import map_weights


class BoundModel:
    """The functions of a virtual machine, with the weights that lie beside its library."""

    def __init__(self, machine: Any, library: Path, device: Any, weights: dict[str, Any] | None = None) -> None:
        self._machine, self._library, self._device = machine, library, device
        self._described = _description(machine)
        self._weights = self._loaded_weights() if weights is None else weights
        self._closures = {
            name: machine[BIND + name](*(self._weights[each] for each in names)) for name, names in self._described["weights"].items()
        }

    def on(self, machine: Any) -> BoundModel:
        """Return the functions of another virtual machine of the same model, with the same weights."""
        return BoundModel(machine, self._library, self._device, self._weights)

    @property
    def signatures(self) -> dict[str, Any]:
        return dict(self._described["functions"])

    @property
    def device_kind(self) -> str:
        """The kind of device that the model was compiled for; empty where it does not say."""
        return str(self._described["device"])

    def instrument(self, hook: Callable[..., Any]) -> None:
        self._machine.set_instrument(hook)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        signatures = self.signatures
        if signatures and name not in signatures:
            raise KeyError(f"{self._library.name} has no function {name}; it has {', '.join(signatures)}")
        closure = self._closures.get(name)
        run: Any = self._machine[name] if closure is None else self._machine.module["invoke_closure"]
        first = () if closure is None else (closure,)

        def function(*arguments: Any) -> Any:
            try:
                return run(*first, *arguments)
            except (RuntimeError, TypeError, ValueError) as error:
                # The virtual machine has checked already; what it says is looked at only where it objects.
                if problem := _problem(name, signatures.get(name), arguments):
                    raise ValueError(problem) from None
                raise error from None

        return function

    def _loaded_weights(self) -> dict[str, Any]:
        if not self._described["weights"]:
            return {}
        path = weights_path(self._library)
        arrays, metadata = map_weights(path)
        if metadata.get(WEIGHTS_DIGEST) != self._described["weights_digest"]:
            raise ArtifactError(f"{path}: the weights are not those that {self._library.name} was exported with; export the model again")
        if problem := memory_problem(sum(array.nbytes for array in arrays.values()), self._device):
            raise ArtifactError(f"{path}: {problem}")
        return {name: _placed(tensor(array), self._device) for name, array in arrays.items()}


def memory_problem(nbytes: int, device: Any) -> str:
    """Return why weights do not fit a GPU's memory; empty where they do, and for a CPU, whose weights are the mapped file."""
    free = None if device.dlpack_device_type() == tvm.cpu().dlpack_device_type() else device.available_global_memory
    if free is None or nbytes <= free:
        return ""
    return f"the weights take {nbytes / 2**30:.1f} GiB, and the GPU has {free / 2**30:.1f} GiB free; use a smaller dtype or a larger GPU"


def _description(machine: Any) -> dict[str, Any]:
    module = machine.module
    if not module.implements_function(SIGNATURE):
        return {"functions": {}, "weights": {}, "weights_digest": "", "device": ""}
    found: dict[str, Any] = json.loads(str(machine[SIGNATURE]()))
    return found


def _placed(given: Any, device: Any) -> Any:
    """Return a tensor in a device's memory; on the CPU it is the mapped file itself."""
    if device.dlpack_device_type() == tvm.cpu().dlpack_device_type():
        return given
    return tvm.runtime.empty(tuple(given.shape), str(given.dtype), device).copyfrom(given)


def _problem(name: str, signature: Any, arguments: Sequence[Any]) -> str:
    if signature is None:
        return ""
    strangers = [type(each).__name__ for each in arguments if not hasattr(each, "shape")]
    if strangers:
        return f"{name} was called with a {strangers[0]}; expected tensors"
    given = [(tuple(map(int, each.shape)), str(each.dtype).removeprefix("torch.")) for each in arguments]
    return misfit(name, signature, given)
