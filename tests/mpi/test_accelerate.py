"""MPIAccelerator with the real Accelerate: a loop over DDP, states of ranks in its checkpoints, and stops."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mpicomp import Communicator, ScaleCom
from mpicomp.torch import require_same
from tests.mpi import integrations

integrations.require("accelerate")

from mpicomp.accelerate import MPIAccelerator  # noqa: E402

pytestmark = integrations.MARKS
reset = integrations.reset
BATCH, EXAMPLES = 4, 96


class Run:
    """A model, its optimizer and its batches, prepared by an accelerator."""

    def __init__(self, algorithm: Any, comm: Communicator) -> None:
        self.accelerator = MPIAccelerator(algorithm, comm)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        inputs = torch.randn(EXAMPLES, 8)
        loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=BATCH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def train(self, steps: int) -> Tensor:
        for _, (images, labels) in zip(range(steps), self.loader, strict=False):
            self.optimizer.zero_grad()
            self.accelerator.backward(nn.functional.cross_entropy(self.model(images), labels))
            self.optimizer.step()
        return torch.cat([one.detach().flatten() for one in self.model.parameters()])


def test_the_ranks_are_those_of_mpi_and_their_models_stay_equal(comm: Communicator) -> None:
    run = Run(ScaleCom(rate=4), comm)
    accelerator = run.accelerator
    assert (accelerator.num_processes, accelerator.process_index) == (comm.size, comm.rank)
    run.train(5)
    require_same(accelerator.unwrap_model(run.model), comm)
    assert [state.iterations for state in accelerator.states] == [5]
    assert accelerator.gather(torch.tensor([comm.rank])).tolist() == list(range(comm.size))


def test_a_saved_state_goes_on_to_the_bit(comm: Communicator, folder: Path) -> None:
    run = Run(ScaleCom(rate=4), comm)
    run.train(4)
    run.accelerator.save_state(str(folder / "saved"))
    straight = run.train(4)
    comm.barrier()
    assert len(list((folder / "saved").glob(f"mpicomp.rank*-of-{comm.size}"))) == comm.size
    other = Run(ScaleCom(rate=4), comm)
    other.accelerator.load_state(str(folder / "saved"))
    assert torch.equal(other.train(4), straight)


def test_a_signal_on_one_rank_is_seen_by_all(comm: Communicator) -> None:
    accelerator = MPIAccelerator(comm=comm)
    assert not accelerator.stop_requested()
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert accelerator.stop_requested()


def test_its_own_communicator_ends_with_the_training() -> None:
    accelerator = MPIAccelerator()
    accelerator.end_training()
    with pytest.raises(RuntimeError, match="closed"):
        accelerator.comm.barrier()


def test_the_program_of_the_page_runs() -> None:
    integrations.run_block("mpicomp.accelerate")
