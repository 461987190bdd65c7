"""Hugging Face Accelerate over MPI, with compressed gradients.

    source slurm/env.sh
    mpirun -n 2 python examples/accelerate_loop.py

Comments mark the lines that change in an Accelerate program over Gloo.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch
from fashion_mnist import accuracy, fashion_mnist, small_cnn
from torch import nn
from torch.utils.data import DataLoader

import mpicomp
from mpicomp.accelerate import MPIAccelerator


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small CNN on Fashion-MNIST with Accelerate.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    options = parser.parse_args()

    accelerator = MPIAccelerator(mpicomp.ScaleCom(rate=8))  # changed: was Accelerator(cpu=True)
    train, test = fashion_mnist()
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for images, labels in islice(loader, options.steps):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()

    accelerator.print(f"accuracy {accuracy(accelerator.unwrap_model(model), test):.1%} after {options.steps} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
