"""Steps of a sharded transformer: native HSDP over Gloo, and FSDP2 with our hook between the nodes, in turn.

    sudo python -m apps.emulator --nodes 2 --ranks-per-node 2 --rate 1gbit -- \
        python -m apps.performance.cluster.sharding --json runs/performance/sharding.json

A side is a model of its own. "native" shards over Gloo inside a node and sums shards over Gloo between nodes. "hook"
shards over Gloo too, and its shards' means come from a method of ours; "hook, mpicomp inside" shards over our backend.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import mpicomp
from apps.environment import environment
from apps.performance.durations import summary
from apps.records import write_record
from mpicomp.cli.timing import alternate

INTERFACE = "eth0"  # of emulated hosts
TIMEOUT = timedelta(seconds=120)
NATIVE, HOOK, INSIDE = "native", "hook", "hook, mpicomp inside"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on every rank; rank 0 prints the table."""
    mpicomp.install_abort_hook()
    options = _parser().parse_args(argv)
    import torch
    import torch.distributed as dist

    from mpicomp.torch import register_backend

    torch.set_num_threads(1)
    if Path("/sys/class/net", INTERFACE).exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", INTERFACE)
    register_backend()
    dist.init_process_group("mpicomp", timeout=TIMEOUT)
    with mpicomp.Communicator(topology="ring", ranks_per_node=options.ranks_per_node) as world:
        nodes = world.nodes
        if len(set(nodes.sizes)) > 1 or nodes.across is None:
            world.reject(ValueError(f"FSDP needs nodes of equal size, not {nodes.sizes}"), "the benchmark")
        sides = _sides(options, nodes)
        times = alternate({name: step for name, (step, _) in sides.items()}, options.repeats, options.warmup, world)
        record = {
            "part": "sharding",
            "environment": environment(),
            "nodes": len(nodes.sizes),
            "ranks_per_node": nodes.sizes[0],
            "parameters": next(iter(sides.values()))[1],
            "tokens": options.tokens,
            "method": options.method,
            "repeats": options.repeats,
            "seconds": {name: {**summary(one), "all_s": one.tolist()} for name, one in times.items()},
        }
    dist.destroy_process_group()
    if world.rank == 0:
        print(table(record), flush=True)
        if options.json:
            write_record(options.json, record)
    return 0


def table(record: dict[str, Any]) -> str:
    """Return the medians, and how many times as fast as native HSDP each side is."""
    seconds = record["seconds"]
    base = seconds[NATIVE]["median_s"]
    rows = [f"| {name} | {one['median_s']:.3f} | {base / one['median_s']:.2f} |" for name, one in seconds.items()]
    about = (
        f"{record['nodes']} nodes of {record['ranks_per_node']} ranks, {record['parameters']:,} parameters, "
        f"{record['tokens']} tokens a rank and step, {record['method']} between nodes"
    )
    return "\n".join([about, "", "| side | seconds a step | times as fast |", "|---|---|---|", *rows])


def _sides(options: argparse.Namespace, nodes: Any) -> dict[str, tuple[Callable[[], None], int]]:
    """Return the step of each side, and its number of parameters; collective."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from mpicomp.torch import fsdp_hook

    place = torch.arange(dist.get_world_size()).view(len(nodes.sizes), -1)
    gloo = _mesh(place, "gloo")
    sides: dict[str, tuple[Callable[[], None], int]] = {NATIVE: _make_training(gloo, options)}
    for name, mesh in ((HOOK, gloo), (INSIDE, _mesh(place, "mpicomp"))):
        shards: DeviceMesh = mesh["shard"]
        step, count = _make_training(shards, options)
        fsdp_hook(mpicomp.algorithm(options.method), nodes.across, step.args[0])
        sides[name] = step, count
    return sides


def _mesh(place: Any, backend: str) -> Any:
    """Return a mesh of nodes and shards, whose groups are of one backend."""
    from torch.distributed.device_mesh import init_device_mesh

    overrides: dict[int | str, Any] = {"node": backend, "shard": backend}
    return init_device_mesh("cpu", tuple(place.shape), mesh_dim_names=("node", "shard"), backend_override=overrides)


def _make_training(mesh: Any, options: argparse.Namespace) -> tuple[partial[None], int]:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from apps.performance.cluster.transformer import Transformer

    torch.manual_seed(0)
    model: nn.Module = Transformer()
    count = sum(one.numel() for one in model.parameters())
    for layer in model.layers.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # of the logits, of which no element is written
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    tokens = torch.randint(256, (1, options.tokens + 1), generator=torch.Generator().manual_seed(os.getpid()))
    return partial(_step, model, optimizer, tokens), count


def _step(model: Any, optimizer: Any, tokens: Any) -> None:
    from torch.nn.functional import cross_entropy

    optimizer.zero_grad()
    cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time steps of native HSDP and of FSDP2 with our hook, in turn.")
    parser.add_argument("--method", "--algorithm", default="marsit", help="between nodes (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="a rank and step (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each side (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default %(default)s)")
    parser.add_argument("--ranks-per-node", type=int, help="neighbours that count as a node; default: as they run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the record")
    return parser


if __name__ == "__main__":
    sys.exit(main())
