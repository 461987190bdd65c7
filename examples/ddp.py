"""DistributedDataParallel over MPI: a process group of the backend "mpicomp", and a hook that compresses gradients.

    source slurm/env.sh
    mpirun -n 2 python examples/ddp.py

Comments mark the lines that change in a DDP program over Gloo.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from images import accuracy, batches, images, small_cnn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import mpicomp
from mpicomp.torch import ddp_hook, register_backend


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small CNN under DDP.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--dense", action="store_true", help="compress nothing, for comparison")
    options = parser.parse_args()

    register_backend()  # added
    dist.init_process_group("mpicomp")  # changed: was "gloo"; mpirun or srun sets the rank
    train, test = images()
    model = DistributedDataParallel(small_cnn(), gradient_as_bucket_view=True)
    comm = mpicomp.Communicator()  # added
    algorithm = mpicomp.Dense() if options.dense else mpicomp.QSGD(levels=7)  # added: four bits per element
    state, hook = ddp_hook(algorithm, comm, model)  # added
    model.register_comm_hook(state, hook)  # added
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
    for inputs, labels in batches(loader, options.steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    if dist.get_rank() == 0:
        sent = state.traffic.total.bytes_sent
        print(
            f"accuracy {accuracy(model.module, test):.1%} after {options.steps} steps; rank 0 sent {sent / 1e6:.1f} MB"
        )
    dist.destroy_process_group()
    comm.close()


if __name__ == "__main__":
    main()
