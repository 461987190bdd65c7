"""PyTorch Lightning over MPI, with a strategy whose gradients are compressed.

    source slurm/env.sh
    mpirun -n 2 python examples/lightning_fit.py

Comments mark the lines that change in an existing program.
"""

from __future__ import annotations

import argparse

import torch
from images import Progress, accuracy, images, small_cnn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mpicomp
from mpicomp.lightning import MPIStrategy


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
    parser = argparse.ArgumentParser(description="Train a small CNN with Lightning.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--dense", action="store_true", help="compress nothing, for comparison")
    options = parser.parse_args()

    train, test = images()
    algorithm = mpicomp.Dense() if options.dense else mpicomp.QSGD(levels=7)
    progress = Progress(options.steps)
    trainer = Trainer(
        strategy=MPIStrategy(algorithm),  # changed; without devices and num_nodes, which MPI knows
        accelerator="cpu", max_steps=options.steps,
        callbacks=LambdaCallback(on_train_batch_start=lambda trainer, *_: progress.show(trainer.global_step)),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print(f"accuracy {accuracy(model.net, test):.1%} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
