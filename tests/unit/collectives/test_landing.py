"""What is done once a copy is there."""

from __future__ import annotations

import pytest

from collectives.devices import Landed


class Copy:
    """A copy that is there the second time it is asked."""

    asked = 0

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        self.asked += 1
        return self.asked > 1


def test_what_follows_a_copy_is_done_once_however_often_it_is_tested() -> None:
    done: list[str] = []
    landed = Landed(Copy(), lambda: done.append("once"))
    assert [landed.Test() for _ in range(4)] == [False, True, True, True]
    assert done == ["once"]


def test_what_fails_behind_a_copy_is_raised_once_and_not_tried_again() -> None:
    landed = Landed(Copy(), lambda: 1 // 0)
    assert not landed.Test()
    with pytest.raises(ZeroDivisionError):
        landed.Test()
    assert landed.Test()
