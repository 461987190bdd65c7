"""Marsit with shared selection sends the bytes of its formula, and unanimous signs stay."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import Communicator
from mpicomp import Marsit
from mpicomp.codecs.shared_selection import SharedSelection
from tests.mpi.lanes import every_size

pytestmark = every_size


@pytest.mark.mpi(min_size=2)
@pytest.mark.communicator(verify=False)
@pytest.mark.parametrize("winners", [1, 2])
def test_each_rank_sends_every_payload_once(comm: Communicator, winners: int) -> None:
    n = 64 * 4096 * comm.size
    aggregator = Marsit(None, global_step=1.0, winners=winners).start(comm, n)
    aggregator.aggregate(np.ones(n, np.float32))
    payload = SharedSelection(comm.size, winners).nbytes(n)
    assert payload == winners * n // 8 // comm.size
    reports = 16  # the clipped elements, and the sum of magnitudes
    assert aggregator.traffic.last.bytes_sent == (comm.size - 1) * (payload + reports)


@pytest.mark.communicator(topology="auto")
def test_signs_on_which_all_ranks_agree_never_flip(comm: Communicator) -> None:
    n = 5000
    signs = np.where(np.arange(n) % 3 == 0, 1, -1).astype(np.float32)
    for winners in (1, 2):
        aggregator = Marsit(None, global_step=0.5, compensation=False, winners=winners).start(comm, n)
        np.testing.assert_array_equal(aggregator.aggregate(signs), 0.5 * signs)
