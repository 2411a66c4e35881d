"""Owns a model's inputs and outputs on the command line: random ones by the signature, .npy files, tensors on a device.

Knows nothing of how models are run or compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from kerneldecl.arrays import Array, aligned, numpy_dtype, random_array
from kerneldecl.artifact.kernels import tensor
from kerneldecl.deploy.error import DeployError
from kerneldecl.deploy.sizes import each_choice, sizes_of_shapes, with_sizes
from kerneldecl.relax.signature import signature_text
from kerneldecl.signature import Arg

RANDOM = "random"


def inputs_of(
    name: str, signature: Mapping[str, Any], given: Sequence[str], sizes: Mapping[str, Sequence[int]] | None = None
) -> list[Array]:
    """Return a function's inputs: of .npy files, or random where `random` is given alone or in the place of one.

    Random ones have the sizes of dynamic dimensions that files have, else those that are given.
    """
    wanted = signature["inputs"]
    chosen = list(given) * len(wanted) if list(given) == [RANDOM] else list(given)
    if len(chosen) != len(wanted):
        raise DeployError(f"{len(given)} inputs were given; expected {signature_text(name, signature)}", "--input random makes all of them")
    files = [None if text == RANDOM else _read(text) for text in chosen]
    if all(array is not None for array in files):
        return [array for array in files if array is not None]
    told = sizes_of_shapes(signature, [None if array is None else array.shape for array in files])
    choices = list(each_choice(name, signature, {**{dim: [size] for dim, size in told.items()}, **(sizes or {})}))
    if len(choices) > 1:
        raise DeployError(f"{len(choices)} combinations of sizes are given", "a run takes one size of each dynamic dimension")
    made = random_inputs(with_sizes(signature, choices[0]))
    return [random if array is None else array for random, array in zip(made, files, strict=True)]


def random_inputs(signature: Mapping[str, Any], seed: int = 0) -> list[Array]:
    """Return random inputs of a function of static shapes."""
    return [random_input(described, f"{seed} {at}") for at, described in enumerate(signature["inputs"])]


def random_input(described: Mapping[str, Any], seed: str) -> Array:
    """Return an input of random values: normal ones for floating point; 0 and 1 for integers, which are indices as often as not."""
    shape = described["shape"]
    if shape is None or any(isinstance(extent, str) for extent in shape):
        way_out = "`kerneldecl run` takes --input FILE.npy for it; `verify` and `bench` cannot make it"
        raise DeployError(f"input {described['name']} has a shape that no sizes of dimensions tell", way_out)
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    arg = Arg(described["name"], tuple(shape), described["dtype"])
    if arg.dtype.startswith(("int", "uint")):
        return rng.integers(0, 2, arg.shape).astype(numpy_dtype(arg.dtype))
    return random_array(rng, arg)


def _read(text: str) -> Array:
    try:
        array: Array = np.load(text, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DeployError(f"{text}: {error}", "expected a .npy file that numpy.save wrote, or the word random") from None
    return array


def on_device(arrays: Sequence[Array], device: Any) -> list[Any]:
    """Return arrays as tensors on a device."""
    tensors = [tensor(aligned(array)) for array in arrays]
    if device.dlpack_device_type() == tvm.cpu().dlpack_device_type():
        return tensors
    return [tvm.runtime.empty(tuple(each.shape), str(each.dtype), device).copyfrom(each) for each in tensors]


def outputs_of(found: Any) -> list[Array]:
    """Return what a function has returned, a tensor or several, as arrays."""
    if hasattr(found, "numpy"):
        return [found.numpy()]
    return [array for each in found for array in outputs_of(each)]


def write_outputs(arrays: Sequence[Array], folder: Path) -> list[str]:
    """Write arrays as output0.npy, …; return the paths. What NumPy has no dtype for, such as bfloat16, is written as float32."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"output{at}.npy" for at in range(len(arrays))]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array if array.dtype.isbuiltin == 1 else array.astype(np.float32))
    return [str(path) for path in paths]
