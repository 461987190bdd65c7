"""Work of workers while values travel: it is over when the call is, after any end of the call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, PeerFailure, Ring
from collectives.threads.run_local import run_local
from mpicomp import ScaleCom
from mpicomp.feedback.memory import Memory
from mpicomp.reducers import shared_indices

N = 4 * shared_indices.BRIEF_ELEMENTS


def test_a_call_that_fails_while_values_travel_waits_for_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[tuple[Memory, Any]] = []

    def slow(self: Memory, share: Any) -> None:
        running.append((self, share))
        time.sleep(0.05)
        running.remove((self, share))

    def fail(*_: Any, **__: Any) -> Iterator[bool]:
        while not running:
            yield False
        raise PeerFailure("a neighbour is gone")

    def take(comm: Communicator) -> int:
        scalecom = ScaleCom().start(comm, N)
        with pytest.raises(PeerFailure, match="a neighbour is gone") as failure:
            scalecom.aggregate(np.ones(N, np.float32))
        assert failure.traceback  # it keeps the frames of the call
        return sum(memory is scalecom.feedback for memory, _ in tuple(running))

    monkeypatch.setattr(Memory, "clear", slow)
    monkeypatch.setattr(shared_indices, "execute", fail)
    assert run_local(2, take, Ring(), threads=2) == [0, 0]
