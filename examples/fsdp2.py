"""FSDP2 over MPI: parameters and optimizer states are sharded over the ranks; a checkpoint is saved and loaded.

    source slurm/env.sh
    mpirun -n 2 python examples/fsdp2.py

Comments mark the lines that change in a program over Gloo. Nothing is compressed; `hsdp.py` compresses between nodes.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from images import accuracy, batches, images
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from mpicomp.torch import register_backend


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose layers are sharded separately, and its optimizer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a sharded model, save it and load it.")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    options = parser.parse_args()

    register_backend()  # added
    dist.init_process_group("mpicomp")  # changed: was "gloo"; mpirun or srun sets the rank
    torch.manual_seed(0)  # the same weights on all ranks: FSDP2 does not broadcast them
    train, test = images()
    model, optimizer = sharded()

    loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
    for inputs, labels in batches(loader, options.steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]  # in a real job: a folder that all nodes share
    dist.broadcast_object_list(folder)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=folder[0])

    other, other_optimizer = sharded()
    state = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = accuracy(model, test), accuracy(other, test)  # on all ranks, since it gathers the layers
    if dist.get_rank() == 0:
        print("accuracy {:.1%}, and {:.1%} as loaded from the checkpoint".format(*found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
