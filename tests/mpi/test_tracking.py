"""Curves of a training in the real TensorBoard, read back from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpicomp import Communicator, Relay
from mpicomp.torch import DistributedOptimizer
from tests.mpi import integrations

integrations.require("tensorboard")

from torch.utils import tensorboard as of_torch  # noqa: E402

from mpicomp.tracking import Tracker, tensorboard  # noqa: E402

pytestmark = integrations.MARKS


def test_tensorboard_has_the_curves_of_rank_0(
    comm: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Kept(of_torch.SummaryWriter):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(of_torch, "SummaryWriter", Kept)
    tensor = torch.nn.Parameter(torch.linspace(-1, 1, 4096))
    optimizer = DistributedOptimizer(torch.optim.SGD([tensor], lr=0.1), Relay(16), comm, synchronize="gradients")
    optimizer.diagnostics(every=1, audit_every=2)
    tracker, sent = Tracker(tensorboard(log_dir=str(folder)), every=2), []
    for step in range(1, 7):
        tensor.grad = tensor.detach() * (1 + comm.rank)
        optimizer.step()
        tracker.record(optimizer, step)
        sent.append(optimizer.traffic.total.bytes_sent)
    assert len(made) == (comm.rank == 0)
    for writer in made:
        writer.close()
    sent = comm.broadcast_object(sent)
    curves = integrations.curves(folder)
    assert curves["mpicomp/total_bytes_sent"] == [(step, sent[step - 1]) for step in (2, 4, 6)]
    traffic, norms = {"bytes_sent", "seconds", "total_bytes_sent"}, {"update_norm", "residual_norm", "residual_ratio"}
    for first, names in ((2, traffic), (4, norms | {"cosine"})):
        for name in names:
            assert [step for step, _ in curves.pop(f"mpicomp/{name}")] == [*range(first, 7, 2)]
    assert not curves
