"""Hugging Face Accelerate over MPI, with compressed gradients.

    source slurm/env.sh
    mpirun -n 2 python examples/accelerate_loop.py

Comments mark the lines that change in an Accelerate program over Gloo.
"""

from __future__ import annotations

import argparse

import torch
from images import accuracy, batches, images, small_cnn
from torch import nn
from torch.utils.data import DataLoader

import mpicomp
from mpicomp.accelerate import MPIAccelerator


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small CNN with Accelerate.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--dense", action="store_true", help="compress nothing, for comparison")
    options = parser.parse_args()

    algorithm = mpicomp.Dense() if options.dense else mpicomp.QSGD(levels=7)
    accelerator = MPIAccelerator(algorithm)  # changed: was Accelerator(cpu=True)
    train, test = images()
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for inputs, labels in batches(loader, options.steps):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()

    found = accuracy(accelerator.unwrap_model(model), test)
    sent = sum(state.traffic.total.bytes_sent for state in accelerator.states)
    accelerator.print(f"accuracy {found:.1%} after {options.steps} steps; rank 0 sent {sent / 1e6:.1f} MB")
    accelerator.end_training()


if __name__ == "__main__":
    main()
