"""A job times a local step and a synchronization of each method, and the loops that others write."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

from apps.frontier import times
from apps.frontier.tasks import TASKS
from mpicomp import Dense, Relay


def test_every_method_is_timed_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "ALGORITHMS", {"dense": Dense(), "Relay(4)": Relay(4), "PowerSGD": Dense()})
    monkeypatch.setattr(times, "own_optimizers", lambda task: {})
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    found = times.measure("gpt", 1)["seconds"]
    shapes = {name: [len(rounds) for rounds in rows] for name, rows in found.items()}
    expected = {"dense": [2] * 3, "Relay(4)": [2] * 3, "PowerSGD": [1] * 3}
    assert shapes == expected | {key + end: [1] * 3 for key in times.OPEN_MPI for end in ("", times.HALF)}
    assert all(seconds > 0 for rows in found.values() for row in rows for seconds in row)


def test_the_loop_of_others_steps_by_the_mean_of_all_gradients(mpi_comm: MPI.Comm) -> None:
    elements = sum(one.numel() for one in TASKS["cnn"].build(0).parameters())
    vector, out = torch.zeros(elements), torch.zeros(elements)
    own: list[torch.Tensor] = []

    def reduce() -> None:
        own.append(vector.clone())
        mpi_comm.Allreduce(vector.numpy(), out.numpy())

    times._loop(TASKS["cnn"], vector, out, reduce, elements)()
    every = torch.from_numpy(mpi_comm.allgather(own[0].numpy())[0])
    assert own[0].count_nonzero() > elements / 2
    torch.testing.assert_close(vector, sum(map(torch.from_numpy, mpi_comm.allgather(own[0].numpy()))) / mpi_comm.size)
    assert mpi_comm.rank == 0 or not torch.equal(every, own[0])
