"""States of several ranks arrive on others in pieces, to the bit, and senders do not copy their long arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from collectives.recovery import state_transfer

if TYPE_CHECKING:
    from mpi4py import MPI

TIMEOUT_S = 20.0


def state_of(rank: int) -> dict[str, Any]:
    """Return a state with arrays of no, few and many pieces, and others whose memory is not in one piece."""
    values = np.random.default_rng(rank).normal(size=(50, 60))
    return {"rank": rank, "empty": values[:0], "long": values, "columns": values.T, "cut": values[:, ::2], "few": [1]}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "PIECE_BYTES", 1000)
    monkeypatch.setattr(state_transfer, "LONG_BYTES", 500)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("n_receivers", [1, 2])
def test_receivers_get_the_states_of_all_senders(mpi_comm: MPI.Comm, n_receivers: int) -> None:
    receivers = list(range(mpi_comm.size))[-n_receivers:]
    senders = [rank for rank in reversed(range(mpi_comm.size)) if rank not in receivers][:3]
    if not senders:
        return
    frames = state_transfer.pack(state_of(mpi_comm.rank)) if mpi_comm.rank in senders else []
    received = state_transfer.transfer(mpi_comm, senders, receivers, frames, TIMEOUT_S, TIMEOUT_S)
    assert len(received) == (len(senders) if mpi_comm.rank in receivers else 0)
    for sender, parts in zip(senders, received, strict=False):
        state, sent = state_transfer.unpack(parts), state_of(sender)
        assert state.keys() == sent.keys()
        for key, value in sent.items():
            np.testing.assert_array_equal(state[key], value)
        state["long"] += 1  # a newcomer may go on in this memory


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.usefixtures("small_pieces")
def test_long_arrays_and_tensors_are_not_copied_to_be_sent(mpi_comm: MPI.Comm) -> None:
    torch = pytest.importorskip("torch")
    state = {"long": np.arange(400.0), "turned": np.zeros((30, 20)).T, "cut": np.arange(400.0)[::2]}
    model = torch.nn.Linear(40, 10)
    tensors = {**model.state_dict(), "half": torch.ones(400, dtype=torch.bfloat16), "turned": torch.ones(50, 40).t()}
    frames = state_transfer.pack((state, tensors))
    addresses = [frame.ctypes.data for frame in frames[1:]]
    assert addresses[:2] == [state["long"].ctypes.data, state["turned"].ctypes.data]
    assert addresses[2:] == [model.weight.data_ptr(), tensors["half"].data_ptr()]
    _, taken = state_transfer.unpack([frame.copy() for frame in frames])
    for key, value in tensors.items():
        assert taken[key].dtype == value.dtype
        assert torch.equal(taken[key], value)
