"""A PyTorch loop of your own: the optimizer is wrapped, and ranks exchange one bit per parameter and step.

    source slurm/env.sh
    mpirun -n 2 python examples/plain_loop.py

Comments mark the lines that are new compared with a loop for one process.
"""

from __future__ import annotations

import argparse

import torch
from images import accuracy, batches, images, small_cnn
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import mpicomp
from mpicomp.torch import DistributedOptimizer, broadcast_parameters


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small CNN.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--dense", action="store_true", help="compress nothing, for comparison")
    options = parser.parse_args()

    comm = mpicomp.Communicator()  # added: all ranks of the job
    train, test = images()
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    broadcast_parameters(model, comm)  # added: all ranks start from the same model
    algorithm = mpicomp.Dense() if options.dense else mpicomp.Marsit(full_precision_every=50)  # added
    optimizer = DistributedOptimizer(  # added: averages the ranks' updates during backward()
        optimizer, algorithm, comm, model.named_parameters(), overlap=True
    )
    sampler = DistributedSampler(train, comm.size, comm.rank)  # added: each rank has its own images

    for inputs, labels in batches(DataLoader(train, batch_size=32, sampler=sampler), options.steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    if comm.rank == 0:
        sent = optimizer.traffic.total.bytes_sent
        print(f"accuracy {accuracy(model, test):.1%} after {options.steps} steps; rank 0 sent {sent / 1e6:.1f} MB")
    comm.close()


if __name__ == "__main__":
    main()
