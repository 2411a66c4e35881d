"""Owns the tests of builds on a cluster: a real scheduler and real worker processes of Dask, on which plug-ins are text.

Knows nothing of TVM. What a build leaves must be what it leaves on one machine, whatever becomes of workers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("distributed", reason="the extra cluster is not installed")

from distributed import Client, LocalCluster
from support.cluster import SECS, FakeDevice, build_on, cluster_of, killing, many
from support.fakes import FakeRunner
from support.spaces import FAKES, Space

from kerneldecl.cluster.likeness import likeness, why_unlike
from kerneldecl.cluster.node import Home, moved, moved_text
from kerneldecl.cluster.runner import Cluster, ClusterRunner
from kerneldecl.errors import ToolchainError
from kerneldecl.hardware import host
from kerneldecl.plugins.load import load_arch
from kerneldecl.tuning.events import Ran

WORKERS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with cluster_of(WORKERS) as started:
        yield started


@pytest.fixture
def space(tmp_path: Path) -> Space:
    (tmp_path / "space").mkdir()
    return Space(tmp_path / "space").write(FAKES)


def kept(space: Space) -> dict[str, Any]:
    """Return all that a build has kept: blobs, and records without what tells of the day and the machine."""
    found: dict[str, Any] = {}
    cache = space.root / "cache"
    for path in sorted([*cache.glob("blob/*/*"), *cache.glob("*/*/*.json")]):
        name = str(path.relative_to(cache))
        found[name] = path.read_bytes()
        if "/tune/" in name:
            record = json.loads(found[name])
            del record["digest"], record["result"]["provenance"]
            found[name] = json.dumps(record)
    return found


def test_a_build_on_a_cluster_leaves_what_it_leaves_here(cluster: LocalCluster, space: Space, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    here = Space(tmp_path / "here").write(FAKES)
    here.build()
    done, events = build_on(cluster, space)
    assert not done.failures
    ours, theirs = kept(here), kept(space)
    assert [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)] == []
    assert (space.root / "workloads.lock").read_bytes() == (here.root / "workloads.lock").read_bytes()
    assert done.started_runner is not None
    assert done.started_runner.counts == {"scheduled": 9, "verified": 9, "measured": 9}
    assert not any(isinstance(event, Ran) and event.failure for event in events)
    again, _ = build_on(cluster, space)
    assert again.started_runner is None, "nothing is left to do"


def test_what_a_schedule_compiles_to_is_not_compiled_again(cluster: LocalCluster, space: Space) -> None:
    build_on(cluster, space)
    records = sorted((space.root / "cache/local/build").glob("*.json"))
    times = [path.stat().st_mtime_ns for path in records]
    space.edit("policies/plain.py", "UNROLLS = (1, 2, 4, 8)", "UNROLLS = (2, 1, 4, 8)")
    done, _ = build_on(cluster, space)
    assert not done.failures
    assert [path.stat().st_mtime_ns for path in records] == times
    assert len(records) == len(list((space.root / "cache/local/build").glob("*.json")))


@pytest.mark.slow
def test_workers_that_die_cost_their_requests_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECS, "0.1")
    here, space = many(tmp_path / "here", 30), many(tmp_path / "far", 30)
    here.build()
    with cluster_of(WORKERS) as started, killing(started, 1.5, WORKERS - 1) as killed:
        done, _ = build_on(started, space)
        deadline = time.monotonic() + 20
        while not killed and time.monotonic() < deadline:  # a fast machine is done before the first one dies; the next build meets it
            time.sleep(0.1)
        assert killed
        again = many(tmp_path / "again", 30)
        done_again, _ = build_on(started, again)
    assert not done.failures
    assert not done_again.failures
    assert kept(space) == kept(here) == kept(again)


def _pretend_unlike() -> None:
    from kerneldecl.cluster import node

    node.why_unlike = lambda _: "apache-tvm is 0.1, not another"  # type: ignore[assignment]


def _pretend_nothing() -> None:
    from kerneldecl.cluster import likeness, node

    node.why_unlike = likeness.why_unlike


def test_a_worker_with_other_software_gets_nothing_to_do(cluster: LocalCluster, space: Space) -> None:
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        try:
            client.run(_pretend_unlike, workers=workers[:1])
            told: list[str] = []
            done, _ = build_on(cluster, space, told.append)
            assert not done.failures
            assert f"worker {workers[0]} is left out (compile): apache-tvm is 0.1, not another" in told
            client.run(_pretend_unlike)
            space.edit("rules/scale.py", "X[i] * {", "X[i]  * {")
            with pytest.raises(ToolchainError, match=r"no worker of tcp://.* can compile; of tcp://.*: apache-tvm is 0\.1"):
                build_on(cluster, space, patience_secs=0.5)
        finally:
            client.run(_pretend_nothing)


@pytest.mark.slow
def test_workers_are_waited_for(space: Space) -> None:
    with cluster_of(0) as started:
        threading.Timer(2.0, started.scale, (1,)).start()
        done, _ = build_on(started, space)
    assert not done.failures


@pytest.mark.slow
def test_without_a_worker_for_it_a_cpu_is_measured_here(space: Space) -> None:
    with cluster_of(1, {}) as started:
        done, _ = build_on(started, space)
    assert not done.failures
    (record, *_) = (space.root / "cache/record/tune").glob("*.json")
    assert json.loads(record.read_text())["result"]["is_measured"]


def test_a_device_that_no_worker_lends_is_named(cluster: LocalCluster, space: Space) -> None:
    told: list[str] = []
    home = Home(str(space.root), str(space.root / "cache"))
    with ClusterRunner(Cluster(cluster.scheduler_address, 0.5, FakeDevice), home, FakeRunner(), told.append, lambda _: None) as runner:
        why = runner.why_not(load_arch(space.root, "h200"))
    assert why == f"no worker of {cluster.scheduler_address} offers GPU=1, to measure for h200"
    assert told == ["waiting for a worker with GPU=1, to measure for h200"]


def test_no_scheduler_is_a_sentence(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerneldecl.cluster.runner._CONNECT_SECS", 1)
    home = Home(str(space.root), str(space.root / "cache"))
    with (
        pytest.raises(ToolchainError, match=r"no scheduler of Dask answers at tcp://127\.0\.0\.1:9: .*`dask scheduler` starts one"),
        ClusterRunner(Cluster("tcp://127.0.0.1:9"), home, FakeRunner(), print, lambda _: None),
    ):
        pass


def test_paths_of_a_request_lead_to_the_workers_folders() -> None:
    places = {"/src": "/node/sources", "/ws/cache": "/node/7/cache"}
    request = {
        "spec": {"root": "/src", "cache": "/ws/cache", "attrs": {"file": "/src/t.json", "other": "/srcs", "n": 3}},
        "roots": ["/src"],
    }
    there = moved(request, places)
    assert there["spec"] == {
        "root": "/node/sources",
        "cache": "/node/7/cache",
        "attrs": {"file": "/node/sources/t.json", "other": "/srcs", "n": 3},
    }
    assert there["roots"] == ["/node/sources"]
    assert moved_text("rules/a.py: /node/sources/x is missing", {"/node/sources": "/src"}) == "rules/a.py: /src/x is missing"


@pytest.mark.slow
def test_likeness_names_what_differs() -> None:
    assert not why_unlike(likeness())
    assert why_unlike({**likeness(), "apache-tvm": "0.1"}) == f"apache-tvm is {likeness()['apache-tvm']}, not 0.1"
    assert host.detect().model
