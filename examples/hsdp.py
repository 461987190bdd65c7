"""FSDP2 inside each node, and compressed gradients between nodes: hybrid sharding with `fsdp_hook`, and a checkpoint.

    source slurm/env.sh
    mpirun -n 2 python examples/hsdp.py

On several nodes add --ranks-per-node 0; on four ranks of one machine, --ranks-per-node 2 makes two nodes of them.
Comments mark the lines that change in a program of native HSDP over Gloo.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from images import accuracy, batches, images
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import mpicomp
from mpicomp.torch import fsdp_hook, register_backend


def sharded(mesh: DeviceMesh) -> nn.Module:
    """Return a model whose layers are sharded separately."""
    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model that is sharded inside each node.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--dense", action="store_true", help="compress nothing, for comparison")
    help_text = "neighbours that count as a node, to try it on one machine; 0: as they run (default 1)"
    parser.add_argument("--ranks-per-node", type=int, default=1, help=help_text)
    options = parser.parse_args()

    register_backend()  # added
    dist.init_process_group("mpicomp")  # changed: was "gloo"; mpirun or srun sets the rank
    world = mpicomp.Communicator(ranks_per_node=options.ranks_per_node or None)  # added
    nodes = world.nodes  # added
    shape = (len(nodes.sizes), nodes.sizes[0])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "shard"))
    train, test = images()
    model = sharded(mesh["shard"])  # changed: was the whole mesh
    algorithm = mpicomp.Dense() if options.dense else mpicomp.QSGD(levels=7)  # added: four bits per element
    hook = fsdp_hook(algorithm, nodes.across, model)  # added
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
    for inputs, labels in batches(loader, options.steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]  # in a real job: a folder that all nodes share
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict(), "hook": hook}, checkpoint_id=folder[0])  # changed: "hook" added
    dcp.load({"hook": hook}, checkpoint_id=folder[0])

    found = accuracy(model, test)  # on all ranks, since it gathers the layers
    if dist.get_rank() == 0:
        sent = hook.traffic.total.bytes_sent
        print(f"accuracy {found:.1%} after {options.steps} steps; rank 0 sent {sent / 1e6:.1f} MB")
    dist.destroy_process_group()
    world.close()


if __name__ == "__main__":
    main()
