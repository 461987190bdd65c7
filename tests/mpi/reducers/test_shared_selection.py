"""Marsit with shared selection equals its one-process simulation, to the bit, and sends what its formula says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator, NonFiniteGradient, Ring
from mpicomp import Marsit
from mpicomp.codecs.shared_selection import SharedSelection
from tests.mpi.lanes import TIMEOUT_S, every_size, same_everywhere
from tests.reference.one_process.marsit import OneProcess

pytestmark = every_size
STEPS = 4


def updates(size: int, n: int, step: int) -> Any:
    """One row a rank, with zeros of either sign."""
    rows = np.random.default_rng([size, n, step]).standard_normal((size, n)).astype(np.float32)
    rows[:, ::20], rows[:, 1::20] = 0.0, -0.0
    return rows


@pytest.mark.parametrize("winners", [1, 2])
@pytest.mark.parametrize("topology", ["auto", "ring"])
@pytest.mark.parametrize("n", [1, 65, 6001, 140_001])
@pytest.mark.parametrize("every", [None, 3])
def test_results_and_residuals_are_those_of_one_process(
    mpi_comm: MPI.Intracomm, winners: int, topology: str, n: int, every: int | None
) -> None:
    options = Marsit(full_precision_every=every, winners=winners, seed=7)
    reference = OneProcess(options, Ring(), mpi_comm.size, n)
    with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=2048) as comm:
        aggregator = options.start(comm, n)
        for step in range(STEPS):
            rows = updates(comm.size, n, step)
            result = aggregator.aggregate(rows[comm.rank])
            assert same_everywhere(comm, result)
            expected = reference.step(rows)
            if every is None or topology == "ring":  # dense sums under "auto" are MPI's
                np.testing.assert_array_equal(result, expected)
                np.testing.assert_array_equal(aggregator.residual, reference.residuals[comm.rank])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("winners", [1, 2])
def test_each_rank_sends_every_payload_once(mpi_comm: MPI.Intracomm, winners: int) -> None:
    n = 64 * 4096 * mpi_comm.size
    with Communicator(mpi_comm, "ring", TIMEOUT_S, verify=False) as comm:
        aggregator = Marsit(None, global_step=1.0, winners=winners).start(comm, n)
        aggregator.aggregate(np.ones(n, np.float32))
        payload = SharedSelection(comm.size, winners).nbytes(n)
        assert payload == winners * n // 8 // comm.size
        reports = 16  # the clipped elements, and the sum of magnitudes
        assert aggregator.traffic.last.bytes_sent == (comm.size - 1) * (payload + reports)


def test_signs_on_which_all_ranks_agree_never_flip(mpi_comm: MPI.Intracomm) -> None:
    n = 5000
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        signs = np.where(np.arange(n) % 3 == 0, 1, -1).astype(np.float32)
        for winners in (1, 2):
            aggregator = Marsit(None, global_step=0.5, compensation=False, winners=winners).start(comm, n)
            np.testing.assert_array_equal(aggregator.aggregate(signs), 0.5 * signs)


def test_states_go_on_to_the_bit_and_nan_is_told(mpi_comm: MPI.Intracomm) -> None:
    n, options = 3000, Marsit(None, winners=2)
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        first, second = options.start(comm, n), options.start(comm, n)
        for step in range(2):
            first.aggregate(updates(comm.size, n, step)[comm.rank])
        second.load_state_dict(first.state_dict())
        third = updates(comm.size, n, 2)[comm.rank]
        np.testing.assert_array_equal(first.aggregate(third), second.aggregate(third))
        bad = np.where(comm.rank == comm.size - 1, np.nan, third).astype(np.float32)
        with pytest.raises(NonFiniteGradient, match=f"rank {comm.size - 1}"):
            first.aggregate(bad)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_winners_are_a_mismatch(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        aggregator = Marsit(None, winners=1 if comm.rank else 2).start(comm, 1000)
        with pytest.raises(CollectiveMismatch, match="winners=2"):
            aggregator.aggregate(np.ones(1000, np.float32))


def test_rule_paper_has_no_winners() -> None:
    with pytest.raises(ValueError, match="winners must be None with residual='paper'"):
        Marsit(residual="paper", winners=1)
