"""Several hosts' failures as one."""

from __future__ import annotations

import pytest

from pdctl.errors import (
    HostCommandError,
    HostsFailed,
    HostUnreachable,
    Locked,
    PdctlError,
    StateError,
)
from pdctl.fleet import attempt_all, on_all

AWAY = HostUnreachable("gpu-a: connect: no answer", host="gpu-a", hint="is it on?")
FULL = StateError("gpu-b: No space left on device", hint="make room")


def test_a_line_for_each_and_the_count() -> None:
    error = HostsFailed([AWAY, FULL], ok=3)
    assert str(error).splitlines() == [
        "gpu-a: connect: no answer; is it on?",
        "gpu-b: No space left on device; make room",
        "3 ok, 2 failed",
    ]
    assert error.hint == ""


def test_a_hint_that_all_share_is_said_once() -> None:
    error = HostsFailed([FULL, StateError("gpu-c: full", hint="make room")], ok=0)
    assert error.hint == "make room" and "make room" not in str(error)


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([AWAY, AWAY], 5),
        ([FULL, FULL], 1),
        ([AWAY, FULL], 5),
        ([Locked("a"), Locked("b")], 4),
        ([Locked("a"), FULL], 1),
        ([Locked("a"), AWAY], 5),
        ([Locked("a"), Locked("b"), HostCommandError("c", host="c")], 1),
    ],
)
def test_the_exit_code_of_all(errors: list[PdctlError], code: int) -> None:
    assert HostsFailed(errors, ok=1).exit_code == code


def test_all_are_tried_and_one_of_one_fails_as_itself() -> None:
    seen = []

    def do(number: int) -> int:
        seen.append(number)
        if number % 2:
            raise AWAY
        return number

    assert attempt_all([1, 2, 3, 4], do) == [AWAY, 2, AWAY, 4]
    assert sorted(seen) == [1, 2, 3, 4] and on_all([2, 4], do) == [2, 4]
    with pytest.raises(HostsFailed, match="1 ok, 1 failed"):
        on_all([1, 2], do)
    with pytest.raises(HostUnreachable):
        on_all([1], do)
