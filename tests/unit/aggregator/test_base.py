"""An aggregator at a prompt."""

from __future__ import annotations

import re
import rlcompleter

import mpicomp
from collectives import Communicator
from tests.documents import DOCUMENTS, inline_code, prose


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
