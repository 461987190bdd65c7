"""The ways made callable, on one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from mpi4py import MPI

import mpicomp
from apps.performance.cluster.tuned import AllreduceAlgorithm
from apps.performance.cluster.vectors import Check, Vector
from apps.performance.cluster.ways import Way
from collectives import Communicator, Traffic

TIMEOUT_S, GLOO_TIMEOUT_S = 600.0, 60.0  # Gloo was seen to wait for ever, with nothing on the wire
GLOO_PORT = 29511
ONE_BIT = mpicomp.Marsit(None, compensation=False, global_step=1.0)
MARSIT = mpicomp.Marsit(None)


@dataclass(frozen=True)
class Side:
    """One way on vectors of one length.

    Attributes
    ----------
    call : callable
    check : callable
        Raises unless the first call's result is right; collective.
    traffic : Traffic or None
        What all calls cost so far, where the way is ours.
    """

    call: Callable[[], object]
    check: Callable[[], None]
    traffic: Traffic | None = None


class Resources:
    """Communicators, and Gloo's group, for the life of a job; making them is collective.

    Parameters
    ----------
    ways : sequence of Way
        All that the job will need.
    address : str
        Of rank 0's host.
    interface : str
        Network interface of every host.
    """

    def __init__(self, ways: Sequence[Way], address: str, interface: str = "eth0") -> None:
        world = MPI.COMM_WORLD
        # the first is the one that ranks line up on; its own Allreduce is MPI's default
        self.comm = Communicator(topology="ring", timeout=TIMEOUT_S)
        self.check = Check(self.comm.mpi_comm)
        self._ours = {
            way.option: Communicator(topology=way.option, timeout=TIMEOUT_S)
            for way in ways
            if way.kind in ("one-bit", "marsit", "dense")
        }
        tuned = [way.option for way in ways if way.kind == "tuned"]
        self._tuned: dict[str, MPI.Comm] = {}
        if tuned:
            algorithm = AllreduceAlgorithm()
            self._tuned = {option: algorithm.dup(world, *map(int, option.split(":"))) for option in tuned}
        self._gloo = any(way.kind == "gloo" for way in ways)
        if self._gloo:
            _start_gloo(world, address, interface)

    def side(self, way: Way, x: Vector, out: Vector) -> Side:
        """One way from `x` to `out`; collective."""
        right = partial(self.check.one_bit if way.packed else self.check.dense, way.name, out)
        if way.packed:
            options = ONE_BIT if way.kind == "one-bit" else MARSIT
            aggregator = options.start(self._ours[way.option], x.size)
            return Side(partial(aggregator.aggregate, x, out), right, aggregator.traffic.total)
        if way.kind == "dense":
            comm = self._ours[way.option]
            return Side(partial(comm.allreduce, x, out=out), right, comm.traffic)
        if way.kind == "gloo":
            return Side(_gloo_allreduce(x, out), right)
        mpi_comm = self._tuned[way.option] if way.kind == "tuned" else self.comm.mpi_comm
        return Side(partial(mpi_comm.Allreduce, x, out), right)

    def close(self) -> None:
        """Free them; collective."""
        if self._gloo:
            from torch import distributed

            distributed.destroy_process_group()
        for tuned in self._tuned.values():
            tuned.Free()
        for comm in (*self._ours.values(), self.comm):
            comm.close()


def _start_gloo(world: MPI.Comm, address: str, interface: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    from torch import distributed

    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{GLOO_PORT}",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=GLOO_TIMEOUT_S),
    )


def _gloo_allreduce(x: Vector, out: Vector) -> Callable[[], object]:
    """Gloo sums in place, so the copy that keeps the input belongs to the call, as in the other ways."""
    import torch
    from torch import distributed

    source, target = torch.from_numpy(x), torch.from_numpy(out)

    def call() -> None:
        target.copy_(source)
        distributed.all_reduce(target)

    return call
