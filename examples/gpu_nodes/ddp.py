"""DDP on nodes with several GPUs: NCCL sums inside a node, and four bits per element travel between nodes.

    mpicomp run --gpus examples/gpu_nodes/ddp.py

Without GPUs, Gloo takes NCCL's place: mpicomp run -n 4 examples/gpu_nodes/ddp.py --ranks-per-node 2
Comments mark the lines that change in a program of DDP with NCCL.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from gpt import GPT, Text, count_steps, options, report
from torch.nn.parallel import DistributedDataParallel

import mpicomp
from mpicomp.torch import ddp_hook, local_device, register_backend


def main() -> None:
    given = options("Train a GPT by DDP on nodes with several GPUs.")
    register_backend()  # added: sets RANK and the like under mpirun and srun
    world = mpicomp.Communicator(ranks_per_node=given.ranks_per_node or None)  # added: all ranks, over MPI
    device = local_device(world)  # changed: was torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    net = GPT(given.layers, given.width, given.context).to(device)
    model = DistributedDataParallel(net, device_ids=[device] if on_gpu else None, gradient_as_bucket_view=True)
    algorithm = mpicomp.Dense() if given.dense else mpicomp.Relay(16)  # added: 16 levels, four bits
    inside = mpicomp.PerNode(algorithm, local="nccl" if on_gpu else "gloo")  # added: sums inside a node
    state, hook = ddp_hook(inside, world, model)  # added
    model.register_comm_hook(state, hook)  # added
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    text = Text(world.rank, given.context, given.batch, device)
    for _ in count_steps(given.steps, world):
        optimizer.zero_grad()
        for micro in range(given.accumulate):
            is_last = micro == given.accumulate - 1
            with nullcontext() if is_last else model.no_sync():  # the last one alone is reduced
                with torch.autocast(device.type, torch.bfloat16):
                    loss = model(text.batch())
                (loss / given.accumulate).backward()
        optimizer.step()

    if world.rank == 0:
        report(loss, given.steps, state.traffic.total.bytes_sent)
    dist.destroy_process_group()
    world.close()


if __name__ == "__main__":
    main()
