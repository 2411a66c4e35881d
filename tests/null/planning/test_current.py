"""Owns the tests of a look that several threads share.

Knows nothing of what is looked at.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from kerneldecl.planning.current import Looked


def test_each_call_has_an_answer_that_is_no_older_than_itself() -> None:
    answers = iter((True, False))
    looked = Looked(lambda: next(answers))
    assert looked()
    assert not looked()


def test_who_ask_during_a_look_share_the_next_one() -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        begun.release()
        may_end.wait(10)
        return len(looks) < 2

    looked = Looked(look)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(looked)
        assert begun.acquire(timeout=10)
        others = [pool.submit(looked) for _ in range(8)]
        assert not looks[1:]
        threading.Timer(0.1, may_end.set).start()
        assert first.result(10)
        assert not any(other.result(10) for other in others[:1])
    assert 2 <= len(looks) <= 9
