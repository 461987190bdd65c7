"""Hugging Face Accelerate over MPI: DDP over the backend "mpicomp", with a hook that compresses gradients.

    source slurm/env.sh
    mpirun -n 2 python examples/accelerate_loop.py

Comments mark the lines that change in an Accelerate program over Gloo.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch
import torch.distributed as dist
from accelerate import Accelerator
from fashion_mnist import accuracy, fashion_mnist, small_cnn
from torch import nn
from torch.utils.data import DataLoader

import mpicomp
from mpicomp.torch import ddp_hook, register_backend


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small CNN on Fashion-MNIST with Accelerate.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    options = parser.parse_args()

    register_backend()  # added
    dist.init_process_group("mpicomp")  # added: Accelerate uses the existing process group
    accelerator = Accelerator(cpu=True)
    train, test = fashion_mnist()
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    comm = mpicomp.Communicator()  # added
    state, hook = ddp_hook(mpicomp.ScaleCom(rate=8), comm, model)  # added: an eighth of the gradient
    model.register_comm_hook(state, hook)  # added

    for images, labels in islice(loader, options.steps):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()

    accelerator.print(f"accuracy {accuracy(accelerator.unwrap_model(model), test):.1%} after {options.steps} steps")
    accelerator.end_training()
    comm.close()


if __name__ == "__main__":
    main()
