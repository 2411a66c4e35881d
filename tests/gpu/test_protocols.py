"""Owns the tests of timing protocols on a real GPU, and of how kernels start behind others in a graph.

Knows nothing of policies.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from support.gpu_additions import H200, SIZE, addition, spec
from support.spaces import Space

from kerneldecl.artifact import graph_starts
from kerneldecl.artifact.kernels import Placed, kernel_of, load_library
from kerneldecl.runners import cuda_device
from kerneldecl.runners.cuda_device import device
from kerneldecl.runners.neighbours import foreign, own
from kerneldecl.signature import Arg
from kerneldecl.timing import PROTOCOLS

pytestmark = pytest.mark.gpu

WAIT = "{{ long long start = clock64(); while (clock64() - start < {}) {{}} }}"
CYCLES = 40_000


@pytest.mark.parametrize("protocol", PROTOCOLS["cuda"])
def test_a_protocol_tells_the_kernels_time_and_not_its_neighbours(tmp_path: Path, measure: Any, protocol: str) -> None:
    """Kernels that wait for a number of clock cycles, at 1 to 3 GHz: a neighbour's time would be seconds by their count."""
    short, long = (addition(tmp_path, WAIT.format(cycles)) for cycles in (CYCLES, 2 * CYCLES))
    measure("sample", spec=spec(), calls=10, samples=3, **short)  # brings the clock up
    secs = [min(measure("sample", spec=spec(), calls=20, samples=7, protocol=protocol, **kernel)["samples"]) for kernel in (short, long)]
    assert 0.8 * CYCLES / 3e9 < secs[0] < CYCLES / 1e9
    assert 1.5 < secs[1] / secs[0] < 2.3


def test_conditions_tell_of_the_clock_that_steady_kernels_run_at(built: Any, measure: Any) -> None:
    kernel = built(size=1 << 22)
    for protocol in ("cool", "steady"):
        assert len(measure("sample", spec=spec(1 << 22), calls=20, samples=2, protocol=protocol, **kernel)["samples"]) == 2
    conditions = measure("measured_peaks")["conditions"]
    assert {"before", "after", "steady"} == conditions.keys()


@pytest.fixture
def add(built: Any) -> Any:
    """Return a launch that adds one to what lies in one buffer, and its buffer as NumPy's array after all launches."""
    gpu, kernel = device(), built()
    addresses = [gpu.allocate(4 * SIZE) for _ in range(2)]
    placed = [
        Placed(Arg(name, (SIZE,), "float32"), addresses[at], Placed.CUDA, gpu.ordinal) for name, at in zip("XYZ", (0, 1, 0), strict=True)
    ]
    tensors = [each.tensor() for each in placed]
    for address, value in zip(addresses, (0, 1), strict=True):
        gpu.upload(np.full(SIZE, value, np.float32), address)
    function = kernel_of(load_library(Path(kernel["library"]), "cuda"), kernel["symbol"])

    def found() -> Any:
        array = np.empty(SIZE, np.float32)
        gpu.download(addresses[0], array)
        return array

    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", gpu.ordinal), gpu.stream.value or 0):
        yield lambda: function(*tensors), found
    for address in addresses:
        gpu.release(address)


@pytest.mark.parametrize(
    ("order", "plain"),
    [("fo", 1), ("oo", 0), ("foofo", 2), ("eoeo", 0), ("feo", 1)],
    ids=["behind another's", "behind ours", "both", "behind one that lets it start early", "ours behind another's"],
)
def test_kernels_start_plainly_behind_kernels_of_others_alone(add: Any, monkeypatch: pytest.MonkeyPatch, order: str, plain: int) -> None:
    """Letters are a kernel of others, one of ours, and our small one; what is computed stays what it was."""
    launch, found = add
    launch()  # loads its code
    device().wait()
    launches: dict[str, Callable[[], object]] = {"f": foreign, "o": launch, "e": own}
    counts: list[int] = []

    def counted(graph: int) -> int:
        counts.append(graph_starts.plain_starts(graph))
        assert graph_starts.plain_starts(graph) == 0
        return counts[-1]

    monkeypatch.setattr(cuda_device, "plain_starts", counted)
    graph = device().timed_graph(lambda: [launches[each]() for each in order])
    for _ in range(3):
        graph.run()
    graph.close()
    assert counts == [plain]
    assert (found() == 1 + 3 * order.count("o")).all()


WORKLOADS = """\
edition = 1

[artifact]
name = "mini"
version = "0.1.0"

[target.gpu]
arch = "h200"
timing = "both"

[defaults]
top_k = 3

[[workload]]
name = "cool"
rule = "elementwise"
op = "add"
shape = [300, 1000]
dtype = "float16"
timing = "cool"

[[workload]]
name = "both"
rule = "softmax"
shape = [300, 1000]
dtype = "float16"
"""


def test_records_hold_every_protocol_of_the_finalists(tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": WORKLOADS})
    space.run("build")
    found = [json.loads(path.read_text(encoding="utf-8")) for path in space.records("tune")]
    protocols = {line for record in found for line in record["manifest"] if line.startswith("search.protocol")}
    assert protocols == {'search.protocol = "cuda-graph-cold-3"', 'search.protocol = "cuda-graph-both-1"'}
    for record in found:
        winner = record["result"]["trials"][0]
        is_cool = 'search.protocol = "cuda-graph-cold-3"' in record["manifest"]
        assert winner["timings"].keys() == ({"steady", "isolated", "chained"} if is_cool else {"cool", "steady", "isolated", "chained"})
        assert all(1e-9 <= secs < 1e-3 for samples in winner["timings"].values() for secs in samples)
    shown = space.run("show", "cool").stdout
    assert all(protocol in shown for protocol in PROTOCOLS["cuda"])
    assert H200.model in found[0]["result"]["provenance"]["gpu"]
