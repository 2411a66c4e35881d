"""Caches are written as torch writes them: rows at positions along any axis, and concatenation to one that begins empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from support.thinned import second
from tvm import relax

from kerneldecl.compiler.model_import.from_torch import module_of_program

torch = pytest.importorskip("torch", reason="the models are torch's")


class _Of(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, of: Callable[..., Any]) -> None:
        super().__init__()
        self.of = of

    def forward(self, *inputs: Any) -> Any:
        return self.of(*inputs)


def put(cache: Any, at: Any, new: Any) -> Any:
    return torch.ops.aten.index_put(cache, [None, None, at], new)


CACHE = torch.arange(48.0).reshape(2, 2, 4, 3)
WRITES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "one row": (lambda cache, at, new: cache.index_copy(2, at, new), (CACHE, torch.tensor([1]), torch.randn(2, 2, 1, 3))),
    "rows": (lambda cache, at, new: cache.index_copy(1, at, new), (CACHE, torch.tensor([1, 0]), torch.randn(2, 2, 4, 3))),
    "counted from the end": (put, (CACHE, torch.tensor([-1]), torch.randn(1, 3))),
    "rows counted from the end": (put, (CACHE, torch.tensor([-1, 0]), torch.randn(2, 1, 2, 3))),
    "one for all": (put, (CACHE, torch.tensor([2]), torch.randn(()))),
    "begins empty": (lambda cache: torch.cat((torch.zeros(0), cache, cache), -2), (CACHE,)),
    "nothing but itself": (lambda cache: torch.cat((torch.zeros(0), cache), -1), (CACHE,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", second(WRITES))
def test_a_cache_is_written_as_torch_writes_it(name: str) -> None:
    of, inputs = WRITES[name]
    mod = module_of_program(torch.export.export(_Of(of), inputs))
    machine = relax.VirtualMachine(relax.build(mod, tvm.target.Target({"kind": "llvm", "opt-level": 0})), tvm.cpu())
    found = machine["main"](*(tvm.runtime.tensor(each.numpy()) for each in inputs))
    np.testing.assert_array_equal((found if hasattr(found, "numpy") else found[0]).numpy(), of(*inputs).numpy())
