"""Ranks that go on where an error ends one of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collectives import process_end


@pytest.mark.parametrize("regroups", [True, False])
def test_only_the_failure_of_a_communicator_that_regroups_keeps_the_ranks_from_regrouping(
    regroups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = SimpleNamespace(has_failed=True, recovers=regroups)
    monkeypatch.setattr(process_end, "_open", [ending, SimpleNamespace(has_failed=False, recovers=True)])
    assert process_end._can_regroup() is not regroups
