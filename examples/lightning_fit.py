"""PyTorch Lightning over MPI: DDP over the backend "mpicomp", with a hook that compresses gradients.

    source slurm/env.sh
    mpirun -n 2 python examples/lightning_fit.py

Lightning detects the rank itself. The strategy below is all that you need to copy.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from fashion_mnist import accuracy, fashion_mnist, small_cnn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mpicomp
from mpicomp.torch import ddp_hook, register_backend


class MPIStrategy(DDPStrategy):
    """DDP over MPI, with gradients averaged by a method of mpicomp."""

    def __init__(self, algorithm: Any, comm: mpicomp.Communicator, **options: Any) -> None:
        register_backend()
        super().__init__(process_group_backend="mpicomp", cluster_environment=MPIEnvironment(), **options)
        self.algorithm, self.comm = algorithm, comm

    def configure_ddp(self) -> None:
        """Register the hook too: Lightning's own option for hooks works on GPUs only."""
        super().configure_ddp()
        self.state, hook = ddp_hook(self.algorithm, self.comm, self.model)
        self.model.register_comm_hook(self.state, hook)


class Classifier(LightningModule):
    """A LightningModule without any changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_cnn()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small CNN on Fashion-MNIST with Lightning.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    options = parser.parse_args()

    comm = mpicomp.Communicator()
    train, test = fashion_mnist()
    trainer = Trainer(
        strategy=MPIStrategy(mpicomp.ScaleCom(rate=8), comm),  # changed
        accelerator="cpu", devices=comm.local_size, num_nodes=comm.size // comm.local_size,  # changed
        max_steps=options.steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print(f"accuracy {accuracy(model.net, test):.1%} after {trainer.global_step} steps")
    comm.close()


if __name__ == "__main__":
    main()
