"""Owns the tests of artifacts: what is in them, that they appear whole or not at all, and that every damage is seen.

Knows nothing of compilers: libraries are text.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.fakes import DieRunner, FakeLinker
from support.spaces import ENTRIES, HEAD, Space

from kerneldecl.artifact import link
from kerneldecl.artifact import manifest as manifests
from kerneldecl.artifact.archive import ARCHIVE, read_member
from kerneldecl.artifact.load import load
from kerneldecl.errors import ArtifactError, ToolchainError
from kerneldecl.store.keys import digest
from kerneldecl.store.results import TuneResult

Damage = Callable[[Path], object]


@pytest.fixture
def built(fakes: Space) -> Space:
    fakes.build()
    return fakes


def manifest(space: Space) -> dict[str, object]:
    found: dict[str, object] = json.loads((space.artifact("box") / "manifest.json").read_text())
    return found


def test_the_manifest_holds_the_digest_of_every_other_file(built: Space) -> None:
    folder = built.artifact("box")
    there = {str(p.relative_to(folder)): digest(p.read_bytes()) for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"}
    assert manifest(built)["files"] == there
    library = str(manifest(built)["library"])
    assert library.startswith("lib/fakes-")
    assert library.endswith(f"{there[library][:16]}.so")


def test_the_manifest_tells_of_every_entry(built: Space) -> None:
    entries = manifest(built)["entries"]
    assert isinstance(entries, list)
    assert [entry["name"] for entry in entries] == ["large", "small", "tabled"]
    large = entries[0]
    assert large["attrs"] == {"dtype": "float32", "factor": 3.0, "n": 64, "table": ""}
    assert large["inputs"] == [{"name": "X", "shape": [64], "dtype": "float32"}]
    assert large["outputs"] == [{"name": "Y", "shape": [64], "dtype": "float32"}]
    assert large["verdict"] == {"verified": True, "error": 1e-6, "tolerance": 1e-4}
    assert large["key"] in {path.stem for path in built.records("tune")}
    assert large["run_secs"] > 0
    assert (large["unmeasured"], large["measured"]) == (False, "")
    assert large["provenance"]["host"] == os.uname().nodename
    assert read_member(built.artifact("box") / ARCHIVE, f"{large['symbol']}.py").startswith(b"# Y[i] = X[i] * 3.0")


def record(key: str, run_secs: float, error: float | None, tolerance: float = 1e-4, *, is_measured: bool = True) -> TuneResult:
    fields = {"symbol": "kd_0", "tolerance": tolerance, "error": error, "run_secs": run_secs, "is_measured": is_measured}
    return TuneResult(key, fields)


@pytest.mark.parametrize(
    ("records", "linked"),
    [
        ((record("a", 2e-3, 0.0), record("b", 1e-3, 0.0)), "b"),
        ((record("b", 1e-3, 0.0), record("a", 1e-3, 0.0)), "a"),
        ((record("a", 2e-3, 1e-4), record("b", 1e-3, 2e-4, 0.5)), "a"),
        ((record("a", 2e-3, 0.0), record("guessed", 1e-3, None, is_measured=False)), "a"),
        ((record("unverified", 2e-3, None), record("guessed", 1e-3, None, is_measured=False)), "unverified"),
        ((record("unverified", 1e-3, None), record("b", 2e-3, 0.0)), "b"),
        ((record("guessed", 2e-3, None, is_measured=False), record("wrong", 1e-3, 2e-4, 0.5)), "guessed"),
        ((record("a", 2e-3, None, is_measured=False), record("b", 1e-3, None, is_measured=False)), "b"),
    ],
    ids=["faster", "equal", "at the tolerance", "guessed", "unverified", "verified", "known to be wrong", "nobody measured"],
)
def test_of_several_kernels_of_one_computation_the_best_known_one_is_linked(records: Sequence[TuneResult], linked: str) -> None:
    assert {symbol: chosen.key for symbol, chosen in link._kernels(records).items()} == {"kd_0": linked}


def test_the_database_has_a_line_for_each_record(built: Space) -> None:
    folder = built.artifact("box") / "database"
    workloads = (folder / "database_workload.json").read_text().splitlines()
    records = [json.loads(line) for line in (folder / "database_tuning_record.json").read_text().splitlines()]
    assert [record[0] for record in records] == list(range(len(workloads))) == [0, 1, 2]
    by_secs = {entry["run_secs"] for entry in manifest(built)["entries"]}  # type: ignore[attr-defined]
    assert {record[1][1][0] for record in records} == by_secs


def test_each_schedule_lies_where_its_readers_look(fakes: Space) -> None:
    """In the database of stock TVM, in the one that needs intrinsics, or, without a trace, in a file of its own."""
    kinds = """kind = " tensorized" if "3.0" in mod else " traceless" if "1 2 3" in mod else ""
    return kind + """
    fakes.edit("templates/unrolled.py", "return ", kinds)
    fakes.build()
    folder, entries = fakes.artifact("box"), {entry["name"]: entry for entry in manifest(fakes)["entries"]}  # type: ignore[attr-defined]
    for name, entry in (("database", entries["small"]), ("database_intrinsics", entries["large"])):
        (workload,) = (folder / name / "database_workload.json").read_text().splitlines()
        (line,) = (folder / name / "database_tuning_record.json").read_text().splitlines()
        assert json.loads(line)[1][1] == [entry["run_secs"]]
        assert json.dumps(entry["attrs"]["factor"]) in workload
        assert entry["traceless"] == ""
    tabled = entries["tabled"]
    assert tabled["traceless"] == f"traceless/{tabled['computation']}.json"
    assert "1 2 3" in json.loads((folder / tabled["traceless"]).read_text())["function"]
    assert manifests.artifact_defect(folder) == ""


def test_artifacts_do_not_depend_on_the_order_of_entries(built: Space, tmp_path: Path) -> None:
    first, *rest = ENTRIES.split("[[workload]]")[1:]
    other = built.copy_of(tmp_path / "other", "cache/record")
    other.write({"workloads.toml": HEAD + "".join(f"[[workload]]{table}\n" for table in [*rest[::-1], first])})
    other.build()
    assert other.artifact_files() == built.artifact_files()


def test_two_builds_from_the_same_records_are_byte_equal(built: Space, tmp_path: Path) -> None:
    other = built.copy_of(tmp_path / "elsewhere" / "deep", "cache/record")
    other.build()
    assert other.artifact_files() == built.artifact_files()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b""), "has other content than its manifest says"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has other content than its manifest says"),
        (lambda path: path.unlink(), "is missing from the artifact"),
    ],
)
@pytest.mark.parametrize("file", ["lib/*.so", "database/database_workload.json", "database/database_tuning_record.json", "kernels.zip"])
def test_every_damage_of_a_file_is_seen_and_the_artifact_linked_again(built: Space, file: str, damage: Damage, words: str) -> None:
    before = built.artifact_files()
    path = next(built.artifact("box").glob(file))
    damage(path)
    defect = manifests.artifact_defect(built.artifact("box"))
    assert path.name in defect
    assert words in defect
    with pytest.raises(ArtifactError, match="build it again"):
        load(built.artifact("box"))
    assert built.build(DieRunner()).links == 1
    assert built.artifact_files() == before


def rewritten(name: str, value: object) -> Damage:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), name: value}, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "there is no artifact yet"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "cannot be read"),
        (lambda path: path.write_text("[]"), "lacks fields"),
        (lambda path: path.write_text("{}"), "lacks fields"),
        (rewritten("schema", 99), "schema 99"),
        (rewritten("entries", []), "was changed after it was written"),
        (rewritten("files", {}), "was changed after it was written"),
        (rewritten("library", "lib/other.so"), "was changed after it was written"),
    ],
)
def test_every_damage_of_the_manifest_is_seen_and_the_artifact_linked_again(built: Space, damage: Damage, words: str) -> None:
    before = built.artifact_files()
    damage(built.artifact("box") / "manifest.json")
    assert words in manifests.artifact_defect(built.root / "dist" / "fakes-1.0" / "box")
    assert built.build(DieRunner()).links == 1
    assert built.artifact_files() == before


def failing_linker(library: Path, objects: Sequence[Path]) -> None:
    raise ToolchainError(f"no {library.name} of {len(objects)} objects")


def test_a_link_that_fails_leaves_the_old_artifact_and_nothing_else(built: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    before = built.artifact_files()
    built.edit("workloads.toml", '"small"', '"tiny"')
    monkeypatch.setattr(FakeLinker, "__call__", lambda _, *args: failing_linker(*args))
    with pytest.raises(ToolchainError, match="of 3 objects"):
        built.build()
    assert built.artifact_files() == before
    assert [path.name for path in (built.root / "dist" / "fakes-1.0").iterdir()] == ["box"]


@pytest.mark.parametrize("is_edited", [False, True])
def test_what_a_killed_link_has_left_goes_with_the_next_build(built: Space, is_edited: bool) -> None:
    left = built.root / "dist" / "fakes-1.0" / ".box-old-killed"
    left.mkdir()
    if is_edited:
        built.edit("workloads.toml", '"small"', '"tiny"')
    assert built.build().links == is_edited
    assert not left.exists()
    assert manifests.artifact_defect(built.artifact("box")) == ""


def test_an_update_replaces_all_of_the_old_artifact(built: Space) -> None:
    before = set(built.artifact_files())
    built.edit("workloads.toml", "factor = 3.0", "factor = 5.0")
    built.build()
    after = set(built.artifact_files())
    assert len(after) == len(before)
    assert len([name for name in after if name.endswith(".so")]) == 1
    assert [path.name for path in (built.root / "dist" / "fakes-1.0").iterdir()] == ["box"]


def test_an_artifact_of_another_version_is_left_alone(built: Space) -> None:
    before = built.artifact_files()
    built.edit("workloads.toml", '"1.0"', '"1.1"')
    built.build()
    assert before.items() <= built.artifact_files().items()
    assert (built.root / "dist" / "fakes-1.1" / "box" / "manifest.json").is_file()


def test_a_folder_of_several_artifacts_asks_for_one(built: Space) -> None:
    target = built.artifact("box")
    shutil.copytree(target, target.parent / "other")
    with pytest.raises(ArtifactError, match="holds 2 artifacts; choose one of"):
        load(target.parent)
    with pytest.raises(ArtifactError, match="holds no artifact"):
        load(built.root)


def test_artifacts_can_be_read_by_others(fakes: Space) -> None:
    """Whatever the builder's umask is: whoever gets a copy of an artifact, in an image or on a shared disk, reads all of it."""
    before = os.umask(0o077)
    try:
        fakes.build()
    finally:
        os.umask(before)
    folder = fakes.artifact("box")
    closed = [
        path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & (wanted := 0o755 if path.is_dir() else 0o644) != wanted
    ]
    assert closed == []


def test_a_manifest_is_written_as_json_writes_it() -> None:
    listed = [1, -2.5, 1e-9, None, True, 'é\n"', [], {}, {"n": [{"m": 1}, [2, [3]]]}]
    written = manifests.with_digest({"b": listed, "a": {"z": {}, "y": ("x",)}})
    found = json.loads(written)
    assert written.decode() == json.dumps(found, indent=1, sort_keys=True) + "\n"
    assert found == {"b": listed, "a": {"z": {}, "y": ["x"]}, "digest": found["digest"]}
