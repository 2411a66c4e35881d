"""Entries for a model's functions join a workloads.toml in which every line that a person wrote stays."""

from __future__ import annotations

import tomllib

from kerneldecl.extract.edit_toml import Function, Merged, Table, merge, tag_word

HEAD = 'edition = 1\n\n[target.host]\narch = "host"   # mine\n'


def matmul(m: int, calls: int = 1, name: str = "gemm") -> Function:
    return Function(name, "matmul", (("m", m),), (("k", 1), ("m", m)), calls)


def tables(text: str) -> list[Table]:
    """Read tables as the declaration would: every list of m expands, and k is 1 by default."""
    lines = [number for number, line in enumerate(text.split("\n"), 1) if line.startswith("[[workload]]")]
    found = []
    for line, table in zip(lines, tomllib.loads(text).get("workload", []), strict=True):
        extents = table["m"] if isinstance(table["m"], list) else [table["m"]]
        workloads = tuple((table["rule"], (("k", table.get("k", 1)), ("m", m))) for m in extents)
        found.append(Table(line, table["name"], tuple(table.get("tags", ())), workloads))
    return found


def merged(text: str, *functions: Function, model: str = "net") -> Merged:
    return merge(text, tables(text), functions, model)


def entries(text: str) -> dict[str, list[str]]:
    return {table["name"]: table["tags"] for table in tomllib.loads(text)["workload"]}


def test_entries_are_appended_with_names_of_their_own_and_counts() -> None:
    found = merged(HEAD.rstrip("\n"), matmul(1), matmul(2, calls=3))
    assert found.text.startswith(HEAD)
    assert entries(found.text) == {"gemm": ["net", "net.calls-1"], "gemm_2": ["net", "net.calls-3"]}
    assert found.new == ("gemm", "gemm_2")


def test_a_second_run_changes_nothing() -> None:
    once = merged(HEAD, matmul(1), matmul(2))
    again = merged(once.text, matmul(2), matmul(1))
    assert again.text == once.text
    assert (again.new, again.known, again.changed, again.unused) == ((), ("gemm", "gemm_2"), (), ())


def test_hand_edits_stay_and_the_entry_is_found_by_its_attributes() -> None:
    once = merged(HEAD, matmul(1)).text
    edited = once.replace('name = "gemm"', 'name = "head"  # the classifier').replace("m = 1\n", "m = [1, 2]\ntop_k = 3\n")
    again = merged(edited, matmul(1), matmul(2), matmul(3))
    assert again.text.startswith(edited.replace("calls-1", "calls-2"))
    assert (again.new, again.known, again.changed) == (("gemm",), ("head",), ("head",))


def test_an_entry_of_other_attributes_is_another() -> None:
    text = HEAD + '\n[[workload]]\nname = "gemm"\nrule = "matmul"\nm = 1\nk = 2\n'
    assert merged(text, matmul(1)).new == ("gemm_2",)


def test_an_unused_entry_is_marked_once_and_unmarked_when_it_is_called_again() -> None:
    before = merged(HEAD, matmul(1), matmul(2)).text
    unused = merged(before, matmul(2))
    assert unused.unused == ("gemm",)
    assert unused.text.replace("# Unused: no longer called by net.\n", "", 1) == before
    assert unused.text.index("# Unused") < unused.text.index('name = "gemm"')
    assert merged(unused.text, matmul(2)).text == unused.text
    assert merged(unused.text, matmul(1), matmul(2)).text == before


def test_only_the_count_of_a_changed_entry_changes() -> None:
    before = merged(HEAD, matmul(1, calls=2), matmul(2, calls=2)).text
    after = merged(before, matmul(1, calls=2), matmul(2, calls=12))
    assert entries(after.text) == {"gemm": ["net", "net.calls-2"], "gemm_2": ["net", "net.calls-12"]}
    assert len(set(before.split("\n")) ^ set(after.text.split("\n"))) == 1


def test_models_share_an_entry_and_neither_takes_it_from_the_other() -> None:
    once = merged(HEAD, matmul(1)).text
    both = merged(once, matmul(1, calls=4), model="other")
    assert entries(both.text) == {"gemm": ["net", "net.calls-1", "other", "other.calls-4"]}
    assert (both.new, both.unused) == ((), ())
    assert merged(both.text, matmul(1)).text == both.text


def test_a_person_s_entry_is_used_and_left_alone() -> None:
    text = HEAD + '\n[[workload]]\nname = "mine"\nrule = "matmul"\nm = 1\ntags = ["fast"]\n'
    found = merged(text, matmul(1))
    assert (found.text, found.known) == (text, ("mine",))
    assert merged(text, matmul(2)).unused == ()


def test_a_model_s_name_becomes_a_tag() -> None:
    assert tag_word("my net (v2)") == "my-net-v2"
    assert tag_word("???") == "model"
