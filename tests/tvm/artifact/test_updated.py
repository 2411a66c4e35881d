"""Owns the tests of arguments that a kernel updates in place: a KV cache in Python's calls, torch's operators, and headers.

Knows nothing of how the kernels are made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.spaces import Space

import kerneldecl
from kerneldecl.artifact.load import Artifact
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule

pytestmark = pytest.mark.slow
WORKLOADS = """\
edition = 1

[artifact]
name = "cache"
version = "0.1.0"
headers = true

[target.host]
arch = "host"

[defaults]
top_k = 1

[[workload]]
name = "append"
rule = "rotary_append"
batch = 2
tokens = 3
heads = 2
size = 8
keys = 16
dtype = "float32"

[[workload]]
name = "paged"
rule = "rotary_append"
batch = 2
tokens = 3
heads = 2
size = 8
keys = 16
page_size = 4
pages = 9
layout = "bshd"
interleaved = true
dtype = "float32"
"""


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Space:
    made = Space(tmp_path_factory.mktemp("cache")).write({"workloads.toml": WORKLOADS})
    made.run("build", "--jobs", "1")
    return made


@pytest.fixture(scope="module")
def kernels(space: Space) -> Artifact:
    return kerneldecl.load(space.artifact())


def drawn(kernel: Any, seed: int = 3) -> tuple[Any, Any, Any]:
    """Return inputs, caches, and what the caches hold after a call."""
    rule = load_rule(STANDARD, "rotary_append").of(STANDARD, kernel.attrs)
    given = rule.inputs(np.random.default_rng(seed))
    inputs = len(kernel.signature.inputs)
    return given[:inputs], given[inputs:], rule.reference(*given)


@pytest.mark.parametrize("name", ["append", "paged"])
def test_a_call_updates_what_it_is_given_and_returns_nothing(kernels: Artifact, name: str) -> None:
    inputs, caches, expected = drawn(kernels[name])
    before = [cache.copy() for cache in caches]
    assert kernels[name](*inputs, *caches) is None
    for cache, want, was in zip(caches, expected, before, strict=True):
        np.testing.assert_allclose(cache, want, rtol=1e-5, atol=1e-5)
        assert 0 < (cache != was).sum() <= 2 * 3 * 2 * 8


def test_tokens_beyond_the_cache_and_before_it_are_not_written(kernels: Artifact) -> None:
    inputs, caches, _ = drawn(kernels["append"])
    before = [cache.copy() for cache in caches]
    inputs[4][:] = (-1, 14)
    kernels["append"](*inputs, *caches)
    for cache, was in zip(caches, before, strict=True):
        written = np.argwhere((cache != was).any(axis=(1, 3))).tolist()
        assert written == [[1, 14], [1, 15]]


def test_a_cache_that_is_left_out_is_one_sentence(kernels: Artifact) -> None:
    inputs, caches, _ = drawn(kernels["append"])
    with pytest.raises(TypeError, match=r"^5 arrays given; expected append\(.*K_cache: float32\[2, 2, 16, 8\]!.*\) -> None: pass 7$"):
        kernels["append"](*inputs)
    with pytest.raises(ValueError, match=r"^V_cache is float32\[2, 2, 15, 8\]; expected"):
        kernels["append"](*inputs, caches[0], caches[1][:, :, 1:].copy())


def test_an_operator_of_torch_mutates_the_cache(kernels: Artifact) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    operators = kernels.torch_ops("kd_updated")
    schema = str(operators.append.default._schema)
    assert schema.endswith("Tensor positions, Tensor(a!) K_cache, Tensor(b!) V_cache) -> ()")
    inputs, caches, expected = drawn(kernels["append"])
    given = [torch.from_numpy(array) for array in inputs]
    # One cache is a view that is not contiguous: what is written comes back to it.
    held = [torch.from_numpy(caches[0]), torch.from_numpy(np.ascontiguousarray(caches[1].swapaxes(1, 2))).transpose(1, 2)]
    assert operators.append(*given, *held) is None
    for cache, want in zip(held, expected, strict=True):
        np.testing.assert_allclose(cache.numpy(), want, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(operators.append.default, (*given, *(cache.contiguous() for cache in held)))


def test_a_header_says_what_it_updates(space: Space) -> None:
    import zipfile

    with zipfile.ZipFile(space.artifact() / "kernels.zip") as held:
        (text,) = (held.read(name).decode() for name in held.namelist() if name == "include/append.h")
    assert "K_cache: float32[2, 2, 16, 8], updated in place" in text
    assert "const std::int32_t* positions, float* K_cache, float* V_cache" in text


def test_a_verification_of_the_artifact_passes(space: Space) -> None:
    assert space.run("verify").stdout.count("ok ") == 2
