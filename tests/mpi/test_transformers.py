"""MPICallback with the real Trainer: training over DDP, states of ranks in its checkpoints, and stops."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpicomp import Communicator, ScaleCom
from mpicomp.torch import require_same
from tests.mpi import integrations

integrations.require("transformers")
integrations.require("accelerate")

from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from mpicomp.tracking import trainer_callback  # noqa: E402
from mpicomp.transformers import MPICallback  # noqa: E402

pytestmark = integrations.MARKS
reset = integrations.reset


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.post_init()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows() -> list[dict[str, Tensor]]:
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return [{"inputs": row, "labels": row[:3].argmax()} for row in inputs]


def trainer(callback: MPICallback, folder: Path, steps: int, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), disable_tqdm=True, use_cpu=True, max_steps=steps,
        ddp_find_unused_parameters=False, per_device_train_batch_size=4, lr_scheduler_type="constant",
        learning_rate=0.01, **{"save_strategy": "no", "report_to": "none"} | options,
    )  # fmt: skip
    return callback.attach(Trainer(Model(PretrainedConfig()), arguments, train_dataset=rows()))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def test_training_goes_on_from_a_checkpoint_to_the_bit(comm: Communicator, folder: Path) -> None:
    straight = trainer(MPICallback(ScaleCom(rate=4), comm), folder / "straight", 6)
    straight.train()
    assert straight.args.world_size == comm.size
    require_same(straight.model, comm)
    trainer(MPICallback(ScaleCom(rate=4), comm), folder / "saved", 3, save_strategy="steps", save_steps=3).train()
    if comm.size > 1:
        assert len(list((folder / "saved" / "checkpoint-3").glob(f"mpicomp.rank*-of-{comm.size}"))) == comm.size
    resumed = trainer(MPICallback(ScaleCom(rate=4), comm), folder / "saved", 6)
    resumed.train(resume_from_checkpoint=str(folder / "saved" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert torch.equal(weights(resumed.model), weights(straight.model))


def test_tensorboard_has_the_curves_and_the_loss_of_every_step(
    comm: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "curves"))
    callback = MPICallback(ScaleCom(rate=4), comm)
    made = trainer(callback, folder, 4, report_to="tensorboard", logging_steps=1)
    made.add_callback(trainer_callback(made, callback, every=2))
    made.train()
    comm.barrier()
    curves = integrations.curves(folder / "curves")
    assert [step for step, _ in curves["train/mpicomp/bytes_sent"]] == [2, 4]
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3, 4]


def test_a_signal_on_one_rank_saves_and_stops_all(comm: Communicator, folder: Path) -> None:
    class Signal(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1 and comm.rank == 0:
                os.kill(os.getpid(), signal.SIGUSR1)

    made = trainer(MPICallback(ScaleCom(rate=4), comm), folder, 20)
    made.add_callback(Signal())
    made.train()
    assert made.state.global_step == 2
    comm.barrier()
    assert (folder / "checkpoint-2" / "trainer_state.json").exists()


@pytest.mark.mpi(min_size=2)
def test_a_signal_in_the_first_step_stops(comm: Communicator, folder: Path) -> None:
    class Signal(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0 and comm.rank == 0:
                os.kill(os.getpid(), signal.SIGUSR1)

    with comm.split(0) as own:  # for which no signals are noted yet
        made = trainer(MPICallback(ScaleCom(rate=4), own), folder, 20)
        made.add_callback(Signal())
        made.train()
    assert made.state.global_step == 1


@pytest.mark.mpi(min_size=2)
def test_a_gradient_scaler_is_refused(comm: Communicator, folder: Path) -> None:
    made = trainer(MPICallback(ScaleCom(rate=4), comm), folder, 2)
    made.accelerator.scaler = object()
    with pytest.raises(ValueError, match="use bf16=True"):
        made.train()


def test_losses_by_a_number_of_ranks_are_refused_where_ranks_regroup(comm: Communicator) -> None:
    made: Any = SimpleNamespace(args=SimpleNamespace(average_tokens_across_devices=True))
    with pytest.raises(ValueError, match="pass False to TrainingArguments, or on_failure='raise'"):
        MPICallback(ScaleCom(rate=4), comm)._go_over_communicator(made, None)


def test_a_callback_that_does_not_know_its_trainer_says_how_to_attach_it(comm: Communicator, folder: Path) -> None:
    callback = MPICallback(ScaleCom(rate=4), comm)
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", max_steps=1)
    made = Trainer(Model(PretrainedConfig()), arguments, train_dataset=rows(), callbacks=[callback])
    with pytest.raises(RuntimeError, match=r"write callback.attach\(trainer\) instead of callbacks="):
        made.train()


def test_the_program_of_the_page_runs() -> None:
    integrations.run_block("mpicomp.transformers")
