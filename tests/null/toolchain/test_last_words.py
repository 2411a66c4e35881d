"""What is said of a tool that failed: of several lines the one that tells why."""

from __future__ import annotations

import subprocess

import pytest

from kerneldecl.toolchain.last_words import last_words


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (1, "", "exit code 1, no message"),
        (1, "a.cpp: In function\na.cpp:3: error: no\nstopped", "a.cpp:3: error: no"),
        (1, "one\ntwo", "two"),
        (-9, "error: no", "its process was killed by SIGKILL"),
        (
            1,
            "collect2: error: ld returned 1 exit status\n/usr/bin/ld: final link failed: No space left on device",
            "/usr/bin/ld: final link failed: No space left on device",
        ),
    ],
)
def test_the_line_that_tells_why(code: int, said: str, words: str) -> None:
    assert last_words(subprocess.CompletedProcess(["ld"], code, "", said)) == words
