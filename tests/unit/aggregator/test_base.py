"""An aggregator at a prompt, and one whose caller a signal interrupts."""

from __future__ import annotations

import re
import rlcompleter

import numpy as np
import pytest

import mpicomp
from collectives import Communicator
from tests.documents import DOCUMENTS, inline_code, prose
from tests.interruptions import interrupted_by


def test_completion_lists_the_names_that_pages_describe(comm: Communicator) -> None:
    aggregator = mpicomp.Marsit().start(comm, 100)
    names = dir(aggregator)
    assert all(hasattr(aggregator, name) for name in names)
    complete = rlcompleter.Completer({"aggregator": aggregator}).attr_matches  # of Python's prompt
    assert {found.strip("()").removeprefix("aggregator.") for found in complete("aggregator.")} == {*names}
    pages = set(re.findall(r"\w+", " ".join(code for page in DOCUMENTS for code in inline_code(prose(page)))))
    assert set(names) - pages <= {"can_undo", "check_state_dict"}  # of undo and load_state_dict, which pages name
    internal = {"let_go", "make_again", "carry"}
    assert internal <= {*vars(type(aggregator))}
    assert not internal & {*names}


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, MemoryError])
def test_an_exception_of_a_signal_handler_leaves_an_aggregator_as_it_is(
    kind: type[Exception], comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal would end the other ranks' call by CollectiveMismatch, and nobody could undo the step before."""
    votes, vector = mpicomp.Marsit(transactional=True).start(comm, 4), np.ones(4, np.float32)
    for _ in range(2):
        votes.aggregate(vector)
    with interrupted_by(kind("of a handler")) as interrupt:
        monkeypatch.setattr(votes.views, "of", interrupt)
        with pytest.raises(kind, match=r"^of a handler$"):
            votes.aggregate(vector)
    assert votes.can_undo


def test_an_error_of_a_device_refuses_a_call_as_any_other(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    votes = mpicomp.Marsit().start(comm, 4)

    def fail(*arguments: object) -> None:
        raise RuntimeError("out of streams")

    monkeypatch.setattr(votes.views, "of", fail)
    with pytest.raises(RuntimeError, match=r"^rank 0 of 1, vector 0: out of streams$"):
        votes.aggregate(np.ones(4, np.float32))
