"""The implementations made callable on one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import cast

from mpi4py import MPI

import mpicomp
from apps.performance.cluster.implementations import Implementation
from apps.performance.cluster.vectors import Check, Vector
from collectives import Communicator, TopologyName, Traffic
from mpicomp.cli.cluster_report.open_mpi_algorithms import AllreduceAlgorithm

TIMEOUT_S, GLOO_TIMEOUT_S = 600.0, 60.0  # Gloo was seen to wait for ever, with nothing on the wire
GLOO_PORT = 29511
ONE_BIT = mpicomp.Marsit(None, compensation=False, global_step=1.0)
MARSIT = mpicomp.Marsit(None)


@dataclass(frozen=True)
class Prepared:
    """An implementation, ready to be called on vectors of one length.

    `check` raises unless the first call's result is right; collective. `traffic` is the cost of all calls so far;
    None for implementations that are not ours.
    """

    call: Callable[[], object]
    check: Callable[[], None] = lambda: None
    traffic: Traffic | None = None


class Resources:
    """Communicators, and Gloo's group, for the implementations of a job; making them is collective.

    `address` is that of rank 0's host.
    """

    def __init__(self, known: Sequence[Implementation], address: str) -> None:
        world = MPI.COMM_WORLD
        # The ranks meet at the barrier of this one; its own Allreduce is MPI's default.
        self.comm = Communicator(topology="ring", timeout=TIMEOUT_S)
        self.check = Check(self.comm.mpi_comm)
        self._ours = {
            one.option: Communicator(topology=cast(TopologyName, one.option), timeout=TIMEOUT_S)
            for one in known
            if one.kind in ("one-bit", "marsit", "dense")
        }
        tuned = [one.option for one in known if one.kind == "tuned"]
        self._tuned: dict[str, MPI.Comm] = {}
        if tuned:
            algorithm = AllreduceAlgorithm()
            self._tuned = {option: algorithm.dup(world, *map(int, option.split(":"))) for option in tuned}
        self._gloo = any(one.kind == "gloo" for one in known)
        if self._gloo:
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            from torch import distributed

            distributed.init_process_group(
                "gloo", init_method=f"tcp://{address}:{GLOO_PORT}", rank=world.rank, world_size=world.size,
                timeout=timedelta(seconds=GLOO_TIMEOUT_S),
            )  # fmt: skip

    def prepare(self, one: Implementation, x: Vector, out: Vector) -> Prepared:
        """Bind an implementation to vectors, from `x` to `out`; collective."""
        right = partial(self.check.one_bit if one.packed else self.check.dense, one.name, out)
        if one.packed:
            options = ONE_BIT if one.kind == "one-bit" else MARSIT
            aggregator = options.start(self._ours[one.option], x.size)
            return Prepared(partial(aggregator.aggregate, x, out), right, aggregator.traffic.total)
        if one.kind == "dense":
            comm = self._ours[one.option]
            return Prepared(partial(comm.allreduce, x, out=out), right, comm.traffic)
        if one.kind == "gloo":
            return Prepared(_gloo_allreduce(x, out), right)
        mpi_comm = self._tuned[one.option] if one.kind == "tuned" else self.comm.mpi_comm
        return Prepared(partial(mpi_comm.Allreduce, x, out), right)

    def close(self) -> None:
        """Free them; collective."""
        if self._gloo:
            from torch import distributed

            distributed.destroy_process_group()
        for tuned in self._tuned.values():
            tuned.Free()
        for comm in (*self._ours.values(), self.comm):
            comm.close()


def _gloo_allreduce(x: Vector, out: Vector) -> Callable[[], object]:
    """Gloo sums in place, so the copy that keeps the input belongs to the call, as with the other implementations."""
    import torch
    from torch import distributed

    source, target = torch.from_numpy(x), torch.from_numpy(out)

    def call() -> None:
        target.copy_(source)
        distributed.all_reduce(target)

    return call
