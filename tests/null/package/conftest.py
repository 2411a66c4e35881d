"""Owns what tests of packages share: a workspace that was built with fakes, its package as a folder and as a tar.

Knows nothing of what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.registries import Registry, serving
from support.spaces import Space

from kerneldecl.package.tar import unpack_tar
from kerneldecl.store.signing import SIGNING_KEY, new_key


@pytest.fixture
def built(fakes: Space) -> Space:
    """Return a workspace that was built."""
    fakes.build(FakeRunner())
    return fakes


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the public key that signs from here on."""
    monkeypatch.setenv(SIGNING_KEY, str(tmp_path / "key.pem"))
    return new_key(tmp_path / "key.pem")


@pytest.fixture
def tar(built: Space, public: str, tmp_path: Path) -> Path:
    """Return the signed package of the workspace as a tar."""
    assert public
    path = tmp_path / "fakes.tar"
    done = built.command("export", "--format", "tar", "-o", str(path))
    assert done.code == 0, done.err
    return path


@pytest.fixture
def package(tar: Path, tmp_path: Path) -> Path:
    """Return the folder of the signed package."""
    folder = tmp_path / "package"
    folder.mkdir()
    unpack_tar(tar, folder)
    return folder


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving() as server:
        yield server
