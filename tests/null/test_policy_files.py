"""The files behind standard policies: a policy's key depends on its own kind of device alone."""

from __future__ import annotations

import pytest

from kerneldecl.plugins.digest import plugin_files
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.policy_order import standard_order

FOREIGN = {"cuda": {"cpu"}, "cpu": {"gpu", "hopper"}}
"""Folders of policies by kind of arch that the kind's policies must not import."""


@pytest.mark.parametrize(("kind", "policy"), [(kind, policy) for kind in ("cuda", "cpu") for policy in standard_order(kind)])
def test_a_policy_imports_nothing_of_another_kind_of_device(kind: str, policy: str) -> None:
    files = [file.relative_to(STANDARD) for file in plugin_files("policies", STANDARD, policy)]
    assert files[0].parts == ("policies", f"{policy}.py")
    assert not [file for file in files if file.parts[0] == "policies" and file.parts[1] in FOREIGN[kind]]
