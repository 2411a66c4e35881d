"""Owns the tests of bundles that travel: signed, in one file, measured by several machines, taken up where they were left.

Knows nothing of TVM: workspaces are built with fakes.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakeRunner
from support.repository import REPOSITORY
from support.spaces import Space

from kerneldecl import api
from kerneldecl.errors import ArtifactError
from kerneldecl.store.local import LocalStore, Miss
from kerneldecl.store.results import BLOBS
from kerneldecl.store.signing import SIGNING_KEY, new_key
from kerneldecl.tuning import bundle
from kerneldecl.tuning.bundle import Trust

NVCC = '#!/bin/sh\ncase "$1" in --version) echo "release 13.0, V13.0.88";; --list-gpu-code) echo sm_90;; esac\n'


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the public key that signs from here on."""
    monkeypatch.setenv(SIGNING_KEY, str(tmp_path / "key.pem"))
    return new_key(tmp_path / "key.pem")


@pytest.fixture
def folder(fakes: Space, public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the signed bundle of three entries for a GPU that is not here; whoever measures gets fake ones."""
    assert public
    text = (REPOSITORY / "kerneldecl/archs/h200.toml").read_text(encoding="utf-8")
    fakes.write({"archs/test-gpu.toml": text.replace('"NVIDIA H200"', '"Test GPU"')})
    fakes.edit("workloads.toml", 'arch = "test-cpu"', 'arch = "test-gpu"')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").write_text(NVCC)
    (tmp_path / "bin/nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (found,) = fakes.build(measure=False).build.bundles.values()
    monkeypatch.setattr(api, "why_not_measured_here", lambda _: "")
    monkeypatch.setattr(api, "LocalRunner", lambda *_: contextlib.nullcontext(FakeRunner()))
    return found


def records(cache: Path) -> set[str]:
    return {path.stem for path in cache.glob("record/tune/*.json")}


def test_a_signed_bundle_leaves_all_that_linking_needs(folder: Path, fakes: Space, public: str, tmp_path: Path) -> None:
    """Records, and the winners' kernels: the machine that builds then compiles nothing."""
    found = api.measure_bundle(folder, tmp_path / "there", trust=Trust(keys=(public,)))
    assert (found["measured"], found["failed"]) == (3, [])
    store = LocalStore(tmp_path / "there")
    for record in store.all("tune", is_local=False):
        for name in BLOBS:
            assert not isinstance(store.read_blob(record.result[name]), Miss)
    shutil.rmtree(fakes.root / "cache/blob")
    shutil.copytree(tmp_path / "there", fakes.root / "cache", dirs_exist_ok=True)
    built = fakes.build()
    assert built.links == 1
    assert built.counts["compile"] == built.counts["sample"] == 0
    assert "unmeasured" not in fakes.read("workloads.lock")


def test_of_a_bundle_that_anybody_may_have_written_no_code_is_kept(folder: Path, tmp_path: Path) -> None:
    assert api.measure_bundle(folder, tmp_path / "there")["measured"] == 3
    assert len(records(tmp_path / "there")) == 3
    assert not (tmp_path / "there/blob").exists()


def _edit_file(folder: Path) -> None:
    (path,) = folder.glob("bundle.json")
    path.write_text(path.read_text().replace('"policy": "plain"', '"policy": "other"', 1))


CHANGES: dict[str, Callable[[Path], object]] = {
    "no signature": lambda folder: (folder / "bundle.sig").unlink(),
    "an empty signature": lambda folder: (folder / "bundle.sig").write_text(""),
    "a signature that is a link": lambda folder: ((folder / "bundle.sig").unlink(), (folder / "bundle.sig").symlink_to("/etc/passwd")),
    "a bundle that was edited": _edit_file,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_bundle_that_nobody_trusted_has_signed_is_not_run(folder: Path, public: str, tmp_path: Path, change: str) -> None:
    CHANGES[change](folder)
    with pytest.raises(ArtifactError, match="signed by nobody who is trusted"):
        api.measure_bundle(folder, tmp_path / "there", trust=Trust(keys=(public,)))
    assert not records(tmp_path / "there")


def test_a_bundle_of_somebody_else_is_not_run(folder: Path, tmp_path: Path) -> None:
    other = new_key(tmp_path / "other.pem")
    with pytest.raises(ArtifactError, match="signed by nobody who is trusted"):
        api.measure_bundle(folder, tmp_path / "there", trust=Trust(keys=(other,)))


def test_a_blob_that_is_not_what_a_candidate_names_is_refused(folder: Path) -> None:
    path = next((folder / "blob").iterdir())
    text = (folder / "bundle.json").read_text().replace(f'"blob/{path.name}"', f'"blob/{"0" * 64}"')
    path.rename(path.with_name("0" * 64))
    (folder / "bundle.json").write_text(text)
    with pytest.raises(ArtifactError, match="are not there"):
        bundle.read_bundle(folder)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_several_machines_have_all_entries_between_them(folder: Path, tmp_path: Path, parts: int) -> None:
    found = [api.measure_bundle(folder, tmp_path / f"machine{part}", part=(part, parts)) for part in range(1, parts + 1)]
    assert sum(each["measured"] for each in found) == 3
    several = [records(tmp_path / f"machine{part}") for part in range(1, parts + 1)]
    assert sum(map(len, several)) == len(set().union(*several)) == 3
    assert max(map(len, several)) - min(map(len, several)) <= 1


class StoppedError(Exception):
    """The machine goes off."""


def test_what_was_measured_before_it_stopped_is_not_measured_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, done = bundle.measure_entry, list[str]()

    def counted(entry: bundle.Entry, *rest: Any) -> Any:
        if len(done) == 2:
            raise StoppedError
        done.append(entry.task.workload.entry)
        return measure(entry, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(bundle, "measure_entry", counted)
        with pytest.raises(StoppedError):
            api.measure_bundle(folder, tmp_path / "there")
    assert len(records(tmp_path / "there")) == 2
    found = api.measure_bundle(folder, tmp_path / "there")
    assert (found["measured_before"], found["measured"]) == (2, 1)


def test_a_bundle_travels_as_one_file(folder: Path, fakes: Space, public: str, tmp_path: Path) -> None:
    packed = tmp_path / "box.bundle.tar"
    assert fakes.command("export", str(folder), "--format", "tar", "-o", str(packed)).code == 0
    assert api.measure_bundle(packed, tmp_path / "there", trust=Trust(keys=(public,)))["measured"] == 3
    elsewhere = Space(tmp_path / "elsewhere")
    elsewhere.root.mkdir()
    done = elsewhere.command("measure", str(packed), "--key", public, "--part", "1/2", "--json")
    assert done.code == 0, done.err
    assert '"measured": 2' in done.out
    for wrong in ("0/2", "3/2", "x", "1"):
        assert elsewhere.command("measure", str(packed), "--part", wrong).code == 2
    packed.write_bytes(packed.read_bytes()[:-700])
    assert elsewhere.command("measure", str(packed)).code == 6
