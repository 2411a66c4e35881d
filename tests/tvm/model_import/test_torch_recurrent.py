"""Recurrent layers of torch: several, in both directions, as exact as torch, with as many functions whatever the steps are."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax

from kerneldecl.compiler.model_import.from_torch import module_of_program
from kerneldecl.compiler.model_import.read_model import called, fused

torch = pytest.importorskip("torch", reason="torch programs need torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of its own layers
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("LSTM", {"num_layers": 2, "batch_first": True, "bidirectional": True}),
    "gru": ("GRU", {"num_layers": 2, "bias": False}),
    "rnn": ("RNN", {"nonlinearity": "relu", "bidirectional": True}),
}


class Whole(torch.nn.Module):  # type: ignore[misc]
    """Recurrent layers, whose last states are results, too."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Any) -> Any:
        y, states = self.layers(x)
        return (y, *states) if isinstance(states, tuple) else (y, states)


def exported(name: str, steps: int, dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    """Return the program of layers, the argument, and what torch makes of it."""
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    model = Whole(getattr(torch.nn, kind)(16, 32, **options)).eval().to(dtype)
    x = torch.randn((3, steps, 16) if options.get("batch_first") else (steps, 3, 16)).to(dtype)
    with torch.no_grad():
        return torch.export.export(model, (x,)), x, model(x)


@pytest.mark.parametrize(("name", "dtype"), [("lstm", "float32"), ("gru", "float16"), ("rnn", "float32")])
def test_results_are_torchs(name: str, dtype: str) -> None:
    program, x, want = exported(name, 7, getattr(torch, dtype))
    machine = relax.VirtualMachine(relax.build(fused(module_of_program(program)), "llvm"), tvm.cpu())
    found = [torch.from_dlpack(each) for each in machine["main"](tvm.runtime.from_dlpack(x))]
    for ours, theirs in zip(found, want, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert float((ours.double() - theirs.double()).abs().max()) < (2e-3 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_steps_share_their_functions(name: str) -> None:
    short, long = (called(fused(module_of_program(exported(name, steps)[0]))) for steps in (17, 33))
    plain = [[found for found, _, _ in each if "joined" not in found] for each in (short, long)]
    assert plain[0] == plain[1]
    assert len(plain[0]) <= 10
