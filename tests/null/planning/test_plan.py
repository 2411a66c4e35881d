"""Owns the tests of the planner as a pure function: what is a hit, what waits for what, and what each reason says.

Knows nothing of files: records come from a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest
from support.fakes import ARCH

from kerneldecl.hardware.arch_file import read_arch
from kerneldecl.model import Candidate, Proposal, Workload
from kerneldecl.planning.action import Kind
from kerneldecl.planning.causes import Cause
from kerneldecl.planning.link import ArtifactOf
from kerneldecl.planning.plan import Inputs, Past, Plan, plan
from kerneldecl.rows import Rows
from kerneldecl.store import keys
from kerneldecl.store.local import NEVER, Miss, Record
from kerneldecl.store.results import BLOBS, Proposed, groups_to_json

BOX = read_arch("test-cpu", ARCH.encode(), "")
WORKLOAD = Workload("a", "box", "scale", (("n", 8),), "plain", 4, None, (), 1)
LOWERED = {"computation": "c" * 64, "signature": {"inputs": [], "outputs": []}, "tolerance": 1e-4}
TUNED = {
    "is_measured": True,
    "object": "object digest",
    "database": "database digest",
    "source": "source digest",
    "build_key": "build key",
    "run_secs": 1e-3,
    "error": 0.0,
    "provenance": {},
}


@dataclass
class World:
    """What a planner is told: declarations' digests, records, blobs, artifacts, the last build."""

    rule: str = "rule digest"
    reference: str = "reference digest"
    proposed: tuple[str, ...] = ("first", "second")
    secs: float = 1e-6
    records: dict[tuple[str, str, bool], Record | Miss] = field(default_factory=dict)
    blobs: set[str] = field(default_factory=lambda: {f"{name} digest" for name in BLOBS})
    linked: dict[str, str] = field(default_factory=dict)
    manifests: dict[tuple[str, Kind], str] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    policies: Mapping[str, str] = field(default_factory=lambda: {"plain": "policy digest"})
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    linked_with: Mapping[str, str] = field(default_factory=dict)

    def plan(self, *workloads: Workload) -> Plan:
        detected = replace(BOX, name="host", is_detected=True)
        inputs = Inputs(
            toolchain={"tvm": "1", "tvm_ffi": "2", "cuda": "3"},
            archs={"box": BOX, "host": detected},
            rules={"scale": self.rule},
            references={"scale": self.reference},
            files={},
            file_attrs={"scale": ()},
            policies={("plain", "cpu"): ("plain",)},
            plugins={("plain", "cpu"): self.policies},
            template=lambda name: f"{name} digest",
            linked_with=self.linked_with,
        )

        def read(kind: str, key: str, is_local: bool) -> Record | Miss:
            return self.records.get((kind, key, is_local), NEVER)

        past = Past(
            lambda entry, kind, _new: self.manifests.get((entry, kind), ""),
            self.blobs.__contains__,
            lambda target, key: "" if self.linked.get(target) == key else "there is no artifact yet",
            lambda entry, _key: entry in self.again,
            lambda entry, key: self.failed.get((entry, key), ""),
            lambda workload, kind, manifests: self.causes(workload.entry, kind, manifests[kind]),
            lambda target, changed, _entries: tuple(Cause(target, *line) for line in changed),
        )
        return plan(workloads or (WORKLOAD,), inputs, read, past, ArtifactOf("ops", "1"))

    def causes(self, entry: str, kind: Kind, manifest: str) -> tuple[Cause, ...]:
        """Return the lines that differ as they are: what they come from is told elsewhere."""
        return tuple(Cause(kind, *line) for line in keys.changed_lines(self.manifests[entry, kind], manifest))

    def do(self, kind: Kind, *workloads: Workload) -> World:
        """Do one kind of action for all entries, as a build would."""
        for action in [a for a in self.plan(*workloads).actions if a.kind == kind and a.key]:
            if kind == "link":
                self.linked[action.target] = action.key
            else:
                proposals = [Proposal(Candidate.of(name, {}), self.secs) for name in self.proposed]
                result = {"lower": LOWERED, "propose": groups_to_json([Proposed("plain", proposals, searches=False)]), "tune": TUNED}[kind]
                self.records[kind, action.key, action.target == "host"] = Record(action.key, action.manifest, result)
            self.manifests[action.entry, kind] = action.manifest
        return self

    def complete(self, *workloads: Workload) -> World:
        return self.do("lower", *workloads).do("propose", *workloads).do("tune", *workloads).do("link", *workloads)


def states(made: Plan) -> dict[str, tuple[bool, str]]:
    return {action.kind: (action.is_hit, action.reason) for action in made.actions}


def test_everything_waits_for_the_lowering_of_a_new_entry() -> None:
    assert states(World().plan()) == {
        "lower": (False, "no record of a yet"),
        "propose": (False, "waits for lower"),
        "tune": (False, "waits for propose"),
        "build": (False, "waits for tune"),
        "link": (False, "waits for a@box"),
    }
    assert [action.key for action in World().plan().actions if action.kind != "lower"] == [""] * 4


def test_for_a_lowered_entry_candidates_are_to_be_proposed() -> None:
    made = World().do("lower").plan()
    assert states(made)["propose"] == (False, "its policies were never asked about this computation")
    assert states(made)["tune"] == (False, "waits for propose")


def test_an_entry_with_candidates_is_to_be_tuned() -> None:
    made = World().do("lower").do("propose").plan()
    assert states(made)["tune"] == (False, "these candidates were never measured")
    assert states(made)["build"] == (False, "waits for tune")
    assert made.entries[0].action("tune").key != ""
    assert "names" not in made.entries[0].action("tune").manifest, "its lower record does not tell of any"


def test_a_tuned_entry_is_to_be_linked() -> None:
    made = World().do("lower").do("propose").do("tune").plan()
    assert [action.kind for action in made.misses] == ["link"]
    assert made.links[0].reason == "there is no artifact yet"


def test_a_complete_workspace_has_nothing_to_do() -> None:
    made = World().complete().plan()
    assert made.misses == ()
    assert [action.kind for action in made.actions] == ["lower", "propose", "tune", "build", "link"]
    assert {action.reason for action in made.actions} == {""}
    assert all(entry.is_done for entry in made.entries)


def test_objects_are_wanted_only_while_the_artifact_is_not_whole() -> None:
    world = World().complete()
    world.blobs = {"database digest"}
    assert world.plan().misses == ()
    world.linked.clear()
    made = world.plan()
    assert states(made)["build"] == (False, "the winner's object and source is not in the store")
    assert [action.kind for action in made.misses] == ["build", "link"]


def test_a_link_waits_for_every_entry_of_its_target_and_names_the_first() -> None:
    others = [replace(WORKLOAD, name=name, attrs=(("n", n),)) for n, name in enumerate("bcd", start=20)]
    world = World().complete()
    assert world.plan(WORKLOAD, *others).links[0].reason == "waits for 3 entries"
    assert world.plan(WORKLOAD, replace(others[0], target="host")).links[0].is_hit, "another target does not matter"


def test_a_detected_arch_reads_the_records_of_this_machine_alone() -> None:
    world = World().do("lower").do("propose").do("tune")
    other = world.plan(replace(WORKLOAD, target="host"))
    assert [action.kind for action in other.misses] == ["lower", "propose", "tune", "build", "link"]
    assert World().complete(replace(WORKLOAD, target="host")).plan(replace(WORKLOAD, target="host")).misses == ()


def test_a_change_is_told_by_the_lines_that_differ() -> None:
    world = World().complete()
    (lower, *_) = world.plan(replace(WORKLOAD, attrs=(("n", 9),))).actions
    assert (lower.reason, lower.changed) == ("lower: attrs.n 8 -> 9", (("attrs.n", "8", "9"),))
    world.rule = "other digest of the rule's files, which is long"
    (lower, *_) = world.plan(replace(WORKLOAD, attrs=(("k", 1), ("n", 9)))).actions
    assert lower.reason == "lower: attrs.k (none) -> 1, lower: attrs.n 8 -> 9 and 1 more"
    assert [name for name, _, _ in lower.changed] == ["attrs.k", "attrs.n", "rule"]


def test_a_changed_rule_that_computes_the_same_is_lowered_and_no_more() -> None:
    world = World().complete()
    world.rule = "digest of the rule with a comment"
    assert [action.kind for action in world.plan().misses] == ["lower", "propose", "tune", "build", "link"], "nobody can know yet"
    assert world.do("lower").plan().misses == ()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda world, w: (world, replace(w, tolerance=0.5)), "search.tolerance"),
        (lambda world, w: (world, replace(w, generation=1)), "search.generation"),
        (lambda world, w: (replace(world, reference="other"), w), "search.reference"),
    ],
)
def test_each_setting_of_the_search_is_a_reason_to_tune(change: Callable[[World, Workload], tuple[World, Workload]], line: str) -> None:
    world, workload = change(World().complete(), WORKLOAD)
    made = world.plan(workload)
    assert made.entries[0].action("lower").is_hit
    tune = made.entries[0].action("tune")
    assert [name for name, _, _ in tune.changed] == [line]
    assert tune.reason.startswith(f"tune: {line} ")


def test_an_attribute_that_leaves_the_computation_as_it_was_may_be_one_of_the_inputs() -> None:
    world, scaled = World().complete(), replace(WORKLOAD, attrs=(("n", 8), ("input_scale", 1e-3)))
    made = world.do("lower", scaled).plan(scaled)
    assert [action.kind for action in made.misses] == ["tune", "build", "link"]
    assert [name for name, _, _ in made.entries[0].action("tune").changed] == ["search.reference"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda world, w: (world, replace(w, top_k=5)), "top_k"),
        (lambda world, w: (replace(world, policies={"plain": "other"}), w), "policies.plain"),
    ],
)
def test_what_policies_see_is_a_reason_to_ask_them(change: Callable[[World, Workload], tuple[World, Workload]], line: str) -> None:
    world, workload = change(World().complete(), WORKLOAD)
    propose = world.plan(workload).entries[0].action("propose")
    assert [name for name, _, _ in propose.changed] == [line]
    assert [action.kind for action in world.plan(workload).misses] == ["propose", "tune", "build", "link"], "nobody can know yet"
    assert world.do("propose", workload).plan(workload).misses == (), "they propose the same"


def test_a_candidate_that_is_new_is_a_reason_to_tune() -> None:
    world = World().complete()
    world.policies, world.proposed = {"plain": "other"}, ("first", "third")
    tune = world.do("propose").plan().entries[0].action("tune")
    assert [name for name, _, _ in tune.changed] == ["candidates.1.plain", "templates.second", "templates.third"]


@pytest.mark.parametrize("fields", [{"tags": ("fast",)}, {"name": "b"}])
def test_what_only_the_artifact_tells_is_linked_anew(fields: dict[str, object]) -> None:
    made = World().complete().plan(replace(WORKLOAD, **fields))  # type: ignore[arg-type]
    assert [action.kind for action in made.misses] == ["link"]
    assert made.links[0].reason.startswith("box: entries.")


SIGNATURE = {"inputs": [{"name": "X", "shape": [8], "dtype": "float32"}], "outputs": []}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *(("lower", fields) for fields in ({"signature": SIGNATURE}, {"flops": 9.0}, {"least_bytes": 9.0})),
        *(("tune", {name: f"{name} of other content"}) for name in BLOBS),
        *(("tune", fields) for fields in ({"run_secs": 2e-3}, {"error": 0.5}, {"measured": 1, "wanted": 2})),
        ("tune", {"provenance": {"host": "another"}}),
    ],
    ids=str,
)
def test_what_an_artifact_says_and_holds_of_an_entry_is_linked_anew(kind: str, fields: dict[str, object]) -> None:
    """The record is another, its key is not: a tuning was repeated, say, or `flops` of a rule mended."""
    world = World().complete()
    world.blobs |= {value for value in fields.values() if isinstance(value, str)}
    (place,) = [place for place in world.records if place[0] == kind]
    before = world.records[place]
    assert isinstance(before, Record)
    world.records[place] = before._replace(result={**before.result, **fields})
    assert [action.kind for action in world.plan().misses] == ["link"]


def test_another_source_that_a_kind_of_kernel_is_linked_with_is_a_link_and_nothing_else() -> None:
    world = replace(World().complete(), linked_with={"cpu": "allocator digest"})
    assert [action.kind for action in world.plan().misses] == ["link"]
    world = world.complete()
    assert [action.kind for action in replace(world, linked_with={"cpu": "another digest"}).plan().misses] == ["link"]
    assert not replace(world, linked_with={"cpu": "allocator digest", "cuda": "another digest"}).plan().misses


@pytest.mark.parametrize(("rows", "count"), [(None, 1), (Rows("a", "n", -1, 8, (8,)), 2)])
def test_the_source_of_what_chooses_among_rows_counts_where_there_are_rows(rows: Rows | None, count: int) -> None:
    workload = replace(WORKLOAD, rows=rows)
    world = World().complete(workload)
    plans = [replace(world, linked_with={"rows": found}).plan(workload) for found in ("dispatch digest", "another digest")]
    assert len({each.entries[0].link_digest for each in plans}) == count, "what link's key has of the entry"


def test_an_artifact_tells_figures_by_their_names() -> None:
    world = World().complete()
    (place,) = [place for place in world.records if place[0] == "lower"]
    for name in ("flops", "least_bytes"):
        world.records[place] = Record(place[1], "", {**LOWERED, name: 9.0})
        assert [action.kind for action in world.plan().misses] == ["link"]
        world.do("link")


def test_a_tolerance_is_judged_and_linked_anew() -> None:
    world, strict = World().complete(), replace(WORKLOAD, tolerance=1e-6)
    assert [action.kind for action in world.plan(strict).misses] == ["tune", "build", "link"]
    again = world.do("tune", strict).plan(strict)
    assert [action.kind for action in again.misses] == ["link"], "of the same kernel it tells another tolerance"


@pytest.mark.parametrize("fields", [{"line": 99}, {"tolerance": 1e-4}])
def test_what_changes_no_result_is_no_reason(fields: dict[str, object]) -> None:
    """Where an entry stands, say, or a tolerance that is the rule's own."""
    assert World().complete().plan(replace(WORKLOAD, **fields)).misses == ()  # type: ignore[arg-type]


def test_an_entry_that_has_failed_under_the_same_key_is_tried_again_and_says_so() -> None:
    world = World().do("lower").do("propose")
    world.failed["a@box", world.plan().entries[0].action("tune").key] = "it failed in the last build: no candidate is right"
    assert states(world.plan())["tune"] == (False, "it failed in the last build: no candidate is right")
    other = world.plan(replace(WORKLOAD, tolerance=0.5)).entries[0].action("tune")
    assert other.reason
    assert "failed" not in other.reason


def test_what_this_machine_has_ranked_counts_until_it_is_measured() -> None:
    world = World().do("lower").do("propose")
    tune = world.plan().entries[0].action("tune")
    world.records["rank", tune.key, True] = Record(tune.key, tune.manifest, {**TUNED, "is_measured": False})
    (entry,) = world.plan().entries
    assert entry.is_unmeasured
    assert entry.action("tune").is_hit
    assert (entry.action("tune").key, entry.action("tune").manifest) == (tune.key, tune.manifest)
    assert not world.do("tune").plan().entries[0].is_unmeasured


def test_a_record_that_is_not_sound_is_named() -> None:
    world = World().complete()
    (tuned,) = [place for place in world.records if place[0] == "tune"]
    world.records[tuned] = Miss("tune/x.json is not JSON (cut off?)")
    made = world.plan()
    assert states(made)["tune"] == (False, "tune/x.json is not JSON (cut off?)")
    assert states(made)["link"] == (False, "waits for a@box")


def test_keys_are_those_of_the_manifests() -> None:
    kept = {"tune", "link"}
    """Manifests that somebody asks for though their action is done."""
    for world in (World(), World().do("lower"), World().do("lower").do("propose"), World().complete()):
        for action in (action for action in world.plan().actions if action.key and action.kind != "build"):
            assert action.key == keys.key(action.manifest) if action.manifest else action.is_hit and action.kind not in kept


def test_numbers_of_rows_for_which_no_time_rises_are_planned_no_longer_once_policies_have_said_so() -> None:
    rows = Rows("a", "n", -1, 512, (16, 512))
    workloads = [replace(WORKLOAD, name=f"a[n={number}]", attrs=(("n", number),), rows=rows) for number in (16, 128, 256, 512)]
    world = World().do("lower", *workloads)
    assert len(world.plan(*workloads).entries) == 4
    assert [each.workload.name for each in world.do("propose", *workloads).plan(*workloads).entries] == ["a[n=16]", "a[n=512]"]
    silent = World(secs=0.0).do("lower", *workloads).do("propose", *workloads)  # as tuners are
    assert len(silent.plan(*workloads).entries) == 4
