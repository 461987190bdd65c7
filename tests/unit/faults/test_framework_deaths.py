"""Ranks that die under Lightning, Accelerate and the Trainer: the survivors train on, log and save among themselves."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(2 * JOB_S)

RANKS, STEPS, BATCH, EXAMPLES, FEATURES, LR = 3, 10, 4, 48, 5, 0.1  # 4 steps an epoch
DEATH = (0, 5)  # the rank that logs and saves, in the second epoch

NET = """
import logging
import warnings
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset
warnings.simplefilter("ignore")
torch.set_num_threads(1)
me = MPI.COMM_WORLD.rank
torch.manual_seed(1)
examples = torch.randn(EXAMPLES, FEATURES)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.calls = torch.nn.Linear(FEATURES, 1), 0
    def forward(self, inputs):
        np.save(FOLDER / f"inputs-{me}-{self.calls}.npy", inputs.numpy())
        if not self.calls:
            np.save(FOLDER / f"first-{me}.npy", vector(self))
        if (me, self.calls) == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        return (self.linear(inputs) - inputs.sum(1, keepdim=True)).square().mean()

def vector(net):
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy()

def finish(net, comm):
    np.save(FOLDER / f"last-{me}.npy", vector(net))
    tell(f"members-{me}", comm.members)

net = Net()
sgd = torch.optim.SGD(net.parameters(), lr=LR)
loader = DataLoader(TensorDataset(examples), batch_size=BATCH, shuffle=True)
"""

LIGHTNING = """
from lightning.pytorch import Callback, LightningModule, Trainer
from mpicomp.lightning import MPIStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, _):
        loss = self.net(batch[0])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss
    def configure_optimizers(self):
        return sgd

class Finish(Callback):
    def on_train_end(self, trainer, module):
        finish(net, trainer.strategy.comm)
        trainer.save_checkpoint(FOLDER / "saved" / "last.ckpt")

strategy = MPIStrategy(mpicomp.Dense(), synchronize=WAY, on_failure="regroup")
trainer = Trainer(
    strategy=strategy, accelerator="cpu", max_steps=STEPS, logger=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=FOLDER, callbacks=[Finish()],
)
trainer.fit(Module(), loader)
assert trainer.is_global_zero == (me == 1)
trainer.save_checkpoint(FOLDER / "saved" / "after.ckpt")
assert (FOLDER / "saved" / f"after.ckpt.rank{strategy.comm.rank}-of-2").is_file()
"""

ACCELERATE = """
from accelerate.state import AcceleratorState, PartialState
from mpicomp.accelerate import MPIAccelerator

accelerator = MPIAccelerator(mpicomp.Dense(), on_failure="regroup")
model, optimizer, loader = accelerator.prepare(net, sgd, loader)
while net.calls < STEPS:
    for (inputs,) in loader:
        accelerator.stop_requested()
        optimizer.zero_grad()
        accelerator.backward(model(inputs))
        optimizer.step()
        if net.calls == STEPS:
            break
many = torch.tensor([20_000_001])  # which float32 cannot hold
found = accelerator.reduce(many, "max")
assert (found.dtype, found.tolist()) == (torch.int64, many.tolist())
for call in (
    accelerator.wait_for_everyone,
    accelerator.stop_requested,
    lambda: accelerator.gather(torch.tensor(float(me))).tolist() == [1, 2] or sys.exit("gather"),
    lambda: accelerator.reduce(torch.tensor([me]), "sum").tolist() == [3] or sys.exit("reduce"),
    lambda: accelerator.save_state(FOLDER / "saved"),
):
    for state in (PartialState, AcceleratorState):
        state._shared_state.update(process_index=me, num_processes=3)  # as before the death
    call()
    assert (accelerator.num_processes, accelerator.process_index, accelerator.is_main_process) == (2, me - 1, me == 1)
for first in (accelerator.main_process_first, accelerator.local_main_process_first):
    with first():
        if me == 1:
            time.sleep(0.2)
            tell(first.__name__)
        assert (FOLDER / first.__name__).is_file()
rows = accelerator.pad_across_processes(torch.ones(2, me), dim=1)
assert rows.tolist() == [[1, 0], [1, 0]] if me == 1 else [[1, 1], [1, 1]], rows
finish(net, accelerator.comm)
accelerator.end_training()
"""

TRAINER = """
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from mpicomp.transformers import MPICallback

class Tracker(TrainerCallback):  # as those of W&B and the like
    def __init__(self):
        self._initialized, self.logged = False, None
    def on_train_begin(self, args, state, control, **_):
        if not self._initialized:
            self._initialized = True
            if state.is_world_process_zero:
                self.logged = []
    def on_log(self, args, state, control, **_):
        self.on_train_begin(args, state, control)
        if state.is_world_process_zero:
            self.logged.append(state.global_step)

class Model(PreTrainedModel):
    config_class = PretrainedConfig
    def __init__(self, config):
        super().__init__(config)
        self.net = net
        self.post_init()
    def forward(self, inputs):
        return {"loss": self.net(inputs)}

with MPICallback(mpicomp.Dense(), on_failure="regroup") as callback:
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "saved"), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=BATCH,
        ddp_find_unused_parameters=False, average_tokens_across_devices=False, logging_steps=1, save_steps=STEPS,
        max_grad_norm=0, report_to="none", disable_tqdm=False,
    )
    rows = [{"inputs": one} for one in examples]
    constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
    trainer = Trainer(Model(PretrainedConfig()), arguments, train_dataset=rows, optimizers=(sgd, constant))
    trainer.add_callback(tracker := Tracker())
    callback.attach(trainer).train()
    assert tracker.logged == ([6, 7, 8, 9, 10, 10] if me == 1 else None), tracker.logged
    assert len([one for one in trainer.state.log_history if "loss" in one]) == STEPS
    finish(net, callback.comm)
"""

FRAMEWORKS = {
    "lightning by a hook": ("lightning", "WAY = 'ddp'" + LIGHTNING, "last.ckpt"),
    "lightning by optimizers": ("lightning", "WAY = 'optimizer'" + LIGHTNING, "last.ckpt"),
    "accelerate": ("accelerate", ACCELERATE, "model.safetensors"),
    "trainer": ("transformers", TRAINER, f"checkpoint-{STEPS}/model.safetensors"),
}


def expected(folder: Path) -> Any:
    """Return the weights after steps with the mean gradient of the ranks that were alive, of the examples they drew."""
    linear = torch.nn.Linear(FEATURES, 1)
    first = torch.from_numpy(np.load(folder / f"first-{DEATH[0]}.npy"))  # that of rank 0, which all take
    torch.nn.utils.vector_to_parameters(first, linear.parameters())
    optimizer = torch.optim.SGD(linear.parameters(), lr=LR)
    for step in range(STEPS):
        ranks = [rank for rank in range(RANKS) if rank != DEATH[0] or step < DEATH[1]]
        optimizer.zero_grad()
        for rank in ranks:
            inputs = torch.from_numpy(np.load(folder / f"inputs-{rank}-{step}.npy"))
            ((linear(inputs) - inputs.sum(1, keepdim=True)).square().mean() / len(ranks)).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(linear.parameters()).detach().numpy()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_survivors_train_on_in_each_framework(jobs: Jobs, tmp_path: Path, name: str) -> None:
    package, program, saved = FRAMEWORKS[name]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-integrations installs it")
    constants: dict[str, Any] = {
        "STEPS": STEPS,
        "BATCH": BATCH,
        "EXAMPLES": EXAMPLES,
        "FEATURES": FEATURES,
        "LR": LR,
        "DEATH": DEATH,
    }
    job = jobs.run_warm(RANKS, NET + program, **constants)
    status, output = job.finish()
    assert status == 0, output
    survivors = [rank for rank in range(RANKS) if rank != DEATH[0]]
    model = expected(tmp_path)
    for rank in survivors:
        assert job.told(f"members-{rank}") == str(tuple(survivors))
        np.testing.assert_allclose(job.load(f"last-{rank}"), model, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(job.load(f"last-{survivors[0]}"), job.load(f"last-{survivors[1]}"))
    assert (tmp_path / "saved" / saved).is_file()  # by the new rank 0
    assert package != "lightning" or (tmp_path / "saved" / "after.ckpt").is_file()
    # shuffled orders are the same on all ranks: in each epoch, no two survivors draw the same example
    per_epoch = EXAMPLES // (RANKS * BATCH)
    for first in range(0, STEPS, per_epoch):
        drawn = [
            np.load(tmp_path / f"inputs-{rank}-{step}.npy")
            for rank in survivors for step in range(first, min(first + per_epoch, STEPS))
        ]  # fmt: skip
        assert len(np.unique(np.concatenate(drawn), axis=0)) == sum(map(len, drawn))
