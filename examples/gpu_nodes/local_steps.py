"""Local steps on nodes with several GPUs: DDP inside a node at every step, two bits between nodes every ten steps.

    mpicomp run --gpus examples/gpu_nodes/local_steps.py

Without GPUs, Gloo takes NCCL's place: mpicomp run -n 4 examples/gpu_nodes/local_steps.py --ranks-per-node 2
Comments mark the lines that change in a program of DDP with NCCL.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt import GPT, Text, count_steps, options, report
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import mpicomp
from mpicomp.torch import DistributedOptimizer, local_device, register_backend

LOCAL_STEPS = 10


def main() -> None:
    given = options("Train a GPT by local steps on nodes with several GPUs.")
    register_backend()  # added: sets RANK and the like under mpirun and srun
    world = mpicomp.Communicator(ranks_per_node=given.ranks_per_node or None)  # added: all ranks, over MPI
    nodes = world.nodes  # added
    device = local_device(world)  # changed: was torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    shape = (len(nodes.sizes), nodes.local.size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("node", "gpu"))  # added

    torch.manual_seed(0)  # the same weights on all ranks
    net = GPT(given.layers, given.width, given.context).to(device)
    inside = mesh["gpu"].get_group()  # added
    model = DistributedDataParallel(net, [device] if on_gpu else None, process_group=inside)  # changed: the node alone
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    algorithm = mpicomp.Dense() if given.dense else mpicomp.Relay()  # added: 4 levels, two bits
    optimizer = DistributedOptimizer(  # added
        adamw,
        mpicomp.PerNode(algorithm, local="nccl" if on_gpu else "gloo"),
        world,
        net.named_parameters(),
        synchronize="updates",
        local_steps=LOCAL_STEPS,
        outer=(0.7, 0.6),
    )

    text = Text(world.rank, given.context, given.batch, device)
    for _ in count_steps(given.steps, world):
        optimizer.zero_grad()
        for micro in range(given.accumulate):
            model.require_backward_grad_sync = micro == given.accumulate - 1  # as model.no_sync() does
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(text.batch())
            (loss / given.accumulate).backward()
        optimizer.step()
    optimizer.synchronize()  # added: takes in the steps since the last synchronization

    if world.rank == 0:
        report(loss, given.steps, optimizer.traffic.total.bytes_sent)
    dist.destroy_process_group()
    world.close()


if __name__ == "__main__":
    main()
