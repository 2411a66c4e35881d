"""torch modules on tuned kernels: compile's callable, and the backend of torch.compile, which is never wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.in_this_process import workers_here

torch = pytest.importorskip("torch", reason="pip install -e '.[models]'")
kerneldecl_torch = pytest.importorskip("kerneldecl.torch")


class One(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have workspaces lie in a folder of this run, which all tests here share."""
    folder = tmp_path_factory.getbasetemp() / "xdg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder
    torch.compiler.reset()


@pytest.fixture
def module() -> Any:
    torch.manual_seed(0)
    return One().eval()


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got, want, 1e-3, 1e-4)


def test_a_module_returns_what_torch_returns(module: Any, cache: Path) -> None:
    x = torch.randn(4, 32)
    with workers_here():
        compiled = kerneldecl_torch.compile(module, (x,))
    assert compiled.workspace.is_relative_to(cache)
    with torch.no_grad():
        for given in (x, torch.randn(32, 4).T, torch.randn(8, 32)[2:6]):  # also what is not contiguous, or not aligned
            assert close(compiled(given), module(given))
    with pytest.raises(ValueError, match=r"input x is float32\[5, 32\]; expected main\(x: float32\[4, 32\]\)"):
        compiled(torch.randn(5, 32))
    with pytest.raises(ValueError, match="not structured as the example's"):
        compiled(x, x)


def test_what_cannot_be_compiled_is_refused_before_anything_is_built(module: Any) -> None:
    with pytest.raises(ValueError, match=r"call module\.eval\(\) first"):
        kerneldecl_torch.compile(module.train(), (torch.randn(4, 32),))

    class Counter(One):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    with pytest.raises(ValueError, match="changes its buffers or inputs"):
        kerneldecl_torch.compile(Counter().eval(), (torch.randn(4, 32),))


@pytest.mark.slow
def test_torch_compile_sees_new_weights(module: Any) -> None:
    compiled = torch.compile(module, backend=kerneldecl_torch.backend, dynamic=False)
    x = torch.randn(4, 32)
    with torch.no_grad():
        assert close(compiled(x), module(x))
        torch.nn.init.ones_(module.linear.weight)
        assert close(compiled(x), module(x))


@pytest.mark.slow
def test_a_graph_that_does_not_fit_is_left_to_torch(module: Any) -> None:
    compiled = torch.compile(module, backend=kerneldecl_torch.backend, dynamic=False)
    x = torch.randn(4, 32)
    with pytest.warns(RuntimeWarning, match="leaves a graph to torch: it needs gradients") as warned:
        out, _ = [compiled(x) for _ in range(2)]
    assert sum("kerneldecl leaves" in str(each.message) for each in warned) == 1
    out.sum().backward()
    assert module.linear.weight.grad is not None
