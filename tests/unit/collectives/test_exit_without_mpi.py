"""Status of a program that goes on to its end after the death of a rank."""

from __future__ import annotations

import pytest

from collectives import exit_without_mpi
from collectives.exit_without_mpi import STATUS_AFTER_DEATH, status_after_death


@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize("given", ["", "75", "-1", "none"])
def test_survivors_end_with_the_status_of_the_environment_if_it_has_one(
    given: str, has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_without_mpi, "_other_failed", has_failed)
    monkeypatch.setenv(STATUS_AFTER_DEATH, given)
    assert status_after_death() == (75 if given == "75" else int(has_failed))
