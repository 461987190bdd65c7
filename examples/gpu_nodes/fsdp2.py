"""FSDP2 on nodes with several GPUs: NCCL shards inside a node, and four bits per element travel between nodes.

    mpicomp run --gpus examples/gpu_nodes/fsdp2.py

Without GPUs, Gloo takes NCCL's place: mpicomp run -n 4 examples/gpu_nodes/fsdp2.py --ranks-per-node 2
Comments mark the lines that change in a program of FSDP2 with NCCL.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt import GPT, Text, count_steps, options, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mpicomp
from mpicomp.torch import fsdp_hook, local_device, register_backend


def main() -> None:
    given = options("Train a GPT by FSDP2 on nodes with several GPUs.")
    register_backend()  # added: sets RANK and the like under mpirun and srun
    world = mpicomp.Communicator(ranks_per_node=given.ranks_per_node or None)  # added: all ranks, over MPI
    nodes = world.nodes  # added
    device = local_device(world)  # changed: was torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shape = (len(nodes.sizes), nodes.local.size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("node", "shard"))

    torch.manual_seed(0)  # the same weights on all ranks
    model = GPT(given.layers, given.width, given.context).to(device)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["shard"], mp_policy=precision)  # changed: was the whole mesh
    algorithm = mpicomp.Dense() if given.dense else mpicomp.Relay(16)  # added: 16 levels, four bits
    hook = fsdp_hook(algorithm, nodes.across, model)  # added
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    text = Text(world.rank, given.context, given.batch, device)
    for _ in count_steps(given.steps, world):
        optimizer.zero_grad()
        for micro in range(given.accumulate):
            model.set_requires_gradient_sync(micro == given.accumulate - 1)  # the last one alone is reduced
            loss = model(text.batch())
            (loss / given.accumulate).backward()
        optimizer.step()

    if world.rank == 0:
        report(loss, given.steps, hook.traffic.total.bytes_sent)
    dist.destroy_process_group()
    world.close()


if __name__ == "__main__":
    main()
