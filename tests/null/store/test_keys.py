"""Owns the tests of manifests and keys: one text that is both hashed and shown.

Knows nothing of actions or of where keys are used.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import ARCH
from support.repository import REPOSITORY

from kerneldecl.hardware.arch_file import read_arch
from kerneldecl.model import Arch, Workload
from kerneldecl.plugins.load import load_arch
from kerneldecl.store import keys
from kerneldecl.store.result_types import wrong_field

TOOLCHAIN = {"tvm": "1.0", "tvm_ffi": "2.0", "cuda": "3.0"}
WORKLOAD = Workload("a[m=16]", "box", "scale", (("dtype", "float32"), ("m", 16), ("steps", ("bias", "relu"))), "plain", 4, None, (), 7)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3) | st.tuples(inner), max_leaves=4
)


def arch() -> Arch:
    return read_arch("test-cpu", ARCH.encode(), "archs/test-cpu.toml")


def lower_manifest(workload: Workload = WORKLOAD, toolchain: dict[str, str] = TOOLCHAIN) -> str:
    return keys.lower_manifest(workload, "rule digest", {"file": "file digest"}, toolchain)


def tune_manifest(arch: Arch, toolchain: dict[str, str] = TOOLCHAIN) -> str:
    candidates = keys.Candidates({"1.plain": "4 digest"}, {"unrolled": "digest"})
    return keys.tune_manifest("computation", arch, {"tolerance": 1e-4}, candidates, toolchain)


def test_manifests_have_the_published_text(golden: Callable[[str, str], None]) -> None:
    texts = [
        lower_manifest(),
        keys.propose_manifest("computation", arch(), 4, {"plain": "digest"}),
        tune_manifest(arch()),
        keys.build_manifest("scheduled", "kd_0", arch(), TOOLCHAIN),
        keys.measure_manifest("code", arch(), {"protocol": "p", "seed": 1, "tolerance": 1e-4}),
    ]
    golden("manifests", "\n".join(texts))


def test_a_key_is_the_digest_of_its_manifest() -> None:
    text = lower_manifest()
    assert keys.key(text) == hashlib.sha256(text.encode()).hexdigest()


def test_lines_of_a_manifest_are_sorted_whatever_the_order_of_its_fields() -> None:
    assert keys.manifest("x", {"b": 1, "a": {"z": 2, "y": 3}}) == keys.manifest("x", {"a": {"y": 3, "z": 2}, "b": 1})
    lines = keys.manifest("x", {"b": 1, "a": {"z": 2, "y": 3}}).splitlines()
    assert lines == sorted(lines)
    assert {"a.y = 3", "a.z = 2", "b = 1"} <= set(lines)


def test_the_action_is_part_of_the_key() -> None:
    assert keys.key(keys.manifest("lower", {"a": 1})) != keys.key(keys.manifest("tune", {"a": 1}))


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), PLAIN, max_size=4), st.data())
def test_values_that_differ_make_other_manifests(fields: dict[str, Any], data: st.DataObject) -> None:
    """Also where a value holds quotes, line ends or what looks like another line."""
    text = keys.manifest("x", fields)
    assert len(text.splitlines()) == len(fields) + 2
    if fields:
        name = data.draw(st.sampled_from(sorted(fields)))
        other = data.draw(PLAIN.filter(lambda value: _json(value) != _json(fields[name])))
        changed = keys.changed_lines(text, keys.manifest("x", {**fields, name: other}))
        assert [line[0] for line in changed] == [name]


def _json(value: Any) -> Any:
    import json

    return json.dumps(value)


def test_changed_lines_tell_of_added_and_removed_ones() -> None:
    old, new = keys.manifest("x", {"kept": 1, "gone": 2, "changed": 3}), keys.manifest("x", {"kept": 1, "changed": 4, "added": 5})
    assert keys.changed_lines(old, new) == [("added", None, "5"), ("changed", "3", "4"), ("gone", "2", None)]
    assert keys.changed_lines(old, old) == []


@pytest.mark.parametrize(
    "other",
    [
        replace(WORKLOAD, name="b"),
        replace(WORKLOAD, target="elsewhere"),
        replace(WORKLOAD, line=99),
        replace(WORKLOAD, tags=("fast",)),
        replace(WORKLOAD, policy="other"),
        replace(WORKLOAD, top_k=9, tolerance=0.5, generation=3),
        replace(WORKLOAD, rule="renamed"),
    ],
)
def test_lowering_depends_on_no_name_and_on_no_setting_of_the_search(other: Workload) -> None:
    assert lower_manifest(other) == lower_manifest()


def test_an_archs_name_and_how_it_was_found_are_in_no_key() -> None:
    assert tune_manifest(replace(arch(), name="other", is_detected=True)) == tune_manifest(arch())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wgmma_arch", "sm_100a"),
        ("compute_capability", (10, 0)),
        *((name, 7) for name in ("sm_count", "max_blocks_per_sm", "max_threads_per_sm", "smem_per_sm_bytes")),
        *((name, 7) for name in ("smem_per_block_optin_bytes", "smem_reserved_per_block_bytes")),
    ],
)
def test_what_a_gpus_modules_are_compiled_with_is_in_the_keys_of_object_and_winner(name: str, value: object) -> None:
    gpu = load_arch(REPOSITORY, "h200")
    assert gpu.gpu is not None
    other = replace(gpu, gpu=replace(gpu.gpu, **{name: value}))  # type: ignore[arg-type]  # each field with its own type
    assert tune_manifest(other) != tune_manifest(gpu)
    assert keys.build_manifest("s", "kd_0", other, TOOLCHAIN) != keys.build_manifest("s", "kd_0", gpu, TOOLCHAIN)
    assert keys.measure_manifest("code", other, {}) == keys.measure_manifest("code", gpu, {}), "the same code takes the same time"


@pytest.mark.parametrize(("name", "count"), [("t4", 1), ("a100-80gb", 1), ("l4", 0), ("h200", 0), ("x86-64-v3", 0)])
def test_how_float8_is_converted_is_in_the_keys_where_no_instruction_does(name: str, count: int) -> None:
    here = load_arch(REPOSITORY, name)
    texts = (tune_manifest(here), keys.build_manifest("s", "kd_0", here, TOOLCHAIN))
    assert [text.count("\nfloat8 = ") for text in texts] == [count, count]


@pytest.mark.parametrize("name", ["h200", "x86-64-v3"])
def test_the_compilers_target_is_in_the_keys_of_object_winner_and_time(name: str) -> None:
    here = load_arch(REPOSITORY, name)
    other = replace(here, tvm_target=(*here.tvm_target, ("opt-level", 1)))
    assert tune_manifest(other) != tune_manifest(here)
    assert keys.build_manifest("s", "kd_0", other, TOOLCHAIN) != keys.build_manifest("s", "kd_0", here, TOOLCHAIN)
    assert keys.measure_manifest("code", other, {}) != keys.measure_manifest("code", here, {})


def test_all_that_an_artifact_says_and_holds_is_in_its_key() -> None:
    said: dict[str, Any] = {"name": "ops", "version": "1", "target": "box", "entries": {"a": "digest"}, "missing": {}}
    other: dict[str, Any] = {"name": "o", "version": "2", "target": "b", "entries": {"a": "other"}, "missing": {"b": "it failed"}}
    texts = [keys.link_manifest(**{**said, name: value}) for name, value in other.items()]
    assert len({keys.link_manifest(**said), *texts}) == len(other) + 1


def test_names_in_a_computation_are_in_its_objects_key() -> None:
    """They are in the text of a CUDA kernel, and in the messages of one for a CPU."""
    build = functools.partial(keys.build_manifest, "s", "kd_0", arch(), TOOLCHAIN)
    assert len({build(), build("a"), build("b")}) == 3


def test_cuda_is_in_no_key_of_a_cpu() -> None:
    other = {**TOOLCHAIN, "cuda": "99"}
    assert tune_manifest(arch(), other) == tune_manifest(arch())
    assert keys.build_manifest("s", "kd_0", arch(), other) == keys.build_manifest("s", "kd_0", arch(), TOOLCHAIN)


def test_code_is_measured_anew_on_another_machine_but_not_for_another_compiler() -> None:
    protocol = {"protocol": "p"}
    assert keys.measure_manifest("code", arch(), protocol) != keys.measure_manifest("code", replace(arch(), model="X"), protocol)
    assert "toolchain" not in keys.measure_manifest("code", arch(), protocol)


@pytest.mark.parametrize("before", [1, True, 1.0])
@pytest.mark.parametrize("value", [1, True, 1.0])
def test_a_manifest_does_not_depend_on_the_entry_before_it(before: object, value: object) -> None:
    """1, True and 1.0 are equal, and their manifests are not: `build ONE` and `build` must agree on keys."""
    lower_manifest(replace(WORKLOAD, attrs=(("flag", before),)))  # type: ignore[arg-type]
    line = {int: "attrs.flag = 1\n", bool: "attrs.flag = true\n", float: "attrs.flag = 1.0\n"}[type(value)]
    assert line in lower_manifest(replace(WORKLOAD, attrs=(("flag", value),)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wrong"), [("digest", 1), ("count", "4"), ("count", True), ("searches", 0), ("text", None), ("policy", 2)]
)
def test_a_list_of_candidates_has_fields_of_their_types(name: str, wrong: object) -> None:
    group = {"policy": "p", "count": 4, "digest": "d", "templates": ["t"], "searches": False, "text": "[]"}
    assert wrong_field("propose", {"groups": [group]}) == ""
    assert wrong_field("propose", {"groups": [{**group, name: wrong}]}) == "groups"
