"""Owns what tests of packages share: a workspace that was built with fakes, its package as a folder and as a tar.

Knows nothing of what is tested.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.fakes import FakeRunner
from support.registries import Registry, serving
from support.spaces import FAKES, Space

from kerneldecl.package.tar import unpack_tar
from kerneldecl.store.signing import SIGNING_KEY, new_key


class Made(NamedTuple):
    """A workspace that was built, its package as a signed tar, and the key that signed it."""

    space: Space
    tar: Path
    key: Path
    public: str


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("made")
    space = Space(root / "space").write(FAKES)
    public = new_key(root / "key.pem")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        patch.setenv(SIGNING_KEY, str(root / "key.pem"))
        space.build(FakeRunner())
        done = space.command("export", "--format", "tar", "-o", str(root / "fakes.tar"))
    assert done.code == 0, done.err
    return Made(space, root / "fakes.tar", root / "key.pem", public)


@pytest.fixture
def built(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    """Return a workspace that was built."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    shutil.copytree(made.space.root, tmp_path / "space")
    return Space(tmp_path / "space")


@pytest.fixture
def public(made: Made, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the public key that signs from here on."""
    monkeypatch.setenv(SIGNING_KEY, str(made.key))
    return made.public


@pytest.fixture
def tar(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the signed package of the workspace as a tar; what is made from here on is signed, too."""
    monkeypatch.setenv(SIGNING_KEY, str(made.key))
    return Path(shutil.copy(made.tar, tmp_path / "fakes.tar"))


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
