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

from mpicomp import QSGD, Auto, Communicator, ScaleCom
from mpicomp.torch import require_same
from tests.mpi import integrations

integrations.require("accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402

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


def test_a_state_without_residuals_has_no_old_ones(comm: Communicator, folder: Path) -> None:
    run = Run(ScaleCom(rate=4), comm)
    run.train(3)
    run.accelerator.save_state(str(folder / "saved"))
    assert run.accelerator.states
    comm.barrier()
    run.accelerator.free_memory()
    assert not run.accelerator.states
    run.accelerator.save_state(str(folder / "saved"))
    comm.barrier()
    assert not list((folder / "saved").glob("mpicomp.rank*"))


def test_models_draw_numbers_of_their_own(comm: Communicator) -> None:
    accelerator = MPIAccelerator({"weight": QSGD(seed=5), "*": Auto(QSGD(seed=5))}, comm)
    models = [accelerator.prepare(nn.Linear(8, 1)) for _ in range(2)]
    for _ in range(4):
        for model in models:
            model(torch.ones(2, 8)).sum().backward()
    algorithms = [[one.algorithm for one in state.aggregators] for state in accelerator.states]
    for seed, of_model in enumerate(algorithms, 5):
        assert {getattr(one, "compressing", one).seed for one in of_model} == {seed}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("option", ["FSDP", "DEEPSPEED", "fp16"])
def test_training_that_the_method_cannot_average_is_refused(
    option: str, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Accelerator.__init__

    def init(self: Any, **options: Any) -> None:  # as with a GPU, or a plugin
        real(self, **options)
        if option == "fp16":
            self.scaler = object()
        else:
            self.state.distributed_type = DistributedType[option]

    monkeypatch.setattr(Accelerator, "__init__", init)
    message = "use bf16" if option == "fp16" else f"trains by {option}, where no method averages gradients"
    with pytest.raises(ValueError, match=message):
        MPIAccelerator(ScaleCom(rate=4), comm)
    MPIAccelerator(None, comm)


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
