"""What a shell or a service may hand over: standard streams that are closed, full or of another encoding; a folder that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.spaces import FAKES, Space, clean_environment

BUILT, OUT_OF_DATE = ("build",), ("plan", "--json")


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace whose name no ASCII can write, with an artifact."""
    found = Space(tmp_path_factory.mktemp("space") / "\u00e4").write(FAKES)
    assert found.command("build", runner=FakeRunner()).code == 0
    return found


@pytest.mark.parametrize("arguments", [BUILT, OUT_OF_DATE], ids=["build", "plan"])
def test_a_current_folder_that_is_gone_is_told(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = ["sh", "-c", f'cd {gone} && rmdir {gone} && exec "$@"', "sh", sys.executable, "-m", "kerneldecl", *arguments]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (10, "")
    assert done.stderr == "error: the current folder is gone; change to another one\n"


def ran(space: Space, redirection: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "kerneldecl", "-C", str(space.root), *arguments]
    return subprocess.run(command, env={**clean_environment(), **environment}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [BUILT, OUT_OF_DATE], ids=["null build", "plan"])
def test_closed_streams_are_as_good_as_dev_null(space: Space, arguments: tuple[str, ...]) -> None:
    done = ran(space, "<&- >&- 2>&-", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", [BUILT, OUT_OF_DATE], ids=["null build", "plan"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_a_sentence(space: Space, arguments: tuple[str, ...], unbuffered: str) -> None:
    done = ran(space, ">/dev/full", *arguments, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 10
    assert done.stderr == "error: a file, or standard output, cannot be read or written: No space left on device\n"


def test_what_an_encoding_lacks_is_escaped(space: Space) -> None:
    done = ran(space, "", "doctor", PYTHONIOENCODING="ascii")
    assert done.returncode in {0, 10}, done.stderr
    assert "internal error" not in done.stderr
    assert "\\xe4" in done.stdout


def test_files_that_are_opened_do_not_take_a_closed_streams_number(tmp_path: Path) -> None:
    text = "import os, sys\nfrom kerneldecl.cli.streams import make_usable\nmake_usable()\nprint('lost')\nsys.stderr.write('lost')\n"
    file = f"opened = os.open({str(tmp_path / 'kept')!r}, os.O_RDWR | os.O_CREAT)\nos.write(1, b'lost')\nos.write(2, b'lost')\n"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", text + file + "sys.exit(opened)"]
    done = subprocess.run(command, env=clean_environment(), check=False)
    assert done.returncode > 2
    assert os.stat(tmp_path / "kept").st_size == 0  # noqa: PTH116
