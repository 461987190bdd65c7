"""Which topology a payload travels by on a network that is known: the one that the model says is fastest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from mpi4py import MPI

from collectives.consistency.call_check import gather_texts
from collectives.cost.link import LinkModel
from collectives.cost.simulate import simulate_time
from collectives.json_file import one_line
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Topology
from collectives.schedules.ring import Ring
from collectives.schedules.torus import Torus
from collectives.schedules.tree import DoubleTree

ALIGNMENT = 8  # bytes: chunks begin at words
_PROBLEM = "\0"  # the first character of a text that tells why a rank knows no network


def fastest(size: int, network: LinkModel, piece_bytes: int) -> Callable[[int], Topology]:
    """What gives the fastest topology for a payload of so many bytes; sizes are rounded up to powers of two.

    Only the network counts, not what ranks compute, which is much the same for all of them.
    """

    @cache
    def of_power(power: int) -> Topology:
        best, best_s = None, float("inf")
        for topology in sorted(_candidates(size, network), key=lambda one: len(one.plan(0, size).steps)):
            at_least_s = len(topology.plan(0, size).steps) * network.latency_s
            if best is None or at_least_s < best_s:
                seconds = simulate_time(
                    topology, size, 1 << power, lambda n, weight: n, network, piece_bytes, alignment=ALIGNMENT
                )
                if best is None or seconds < best_s:
                    best, best_s = topology, seconds
        assert best is not None
        return best

    return lambda nbytes: of_power(max(0, nbytes - 1).bit_length())


def _candidates(size: int, network: LinkModel) -> tuple[Topology, ...]:
    return Ring(), HalvingDoubling(), DoubleTree(), *tori(size, network)


def tori(size: int, network: LinkModel) -> list[Torus]:
    """The most square torus, and one with a row per group of ranks; none that is only a ring."""
    shapes = {Torus().shape(size)}
    if network.group_size is not None and size % network.group_size == 0:
        shapes.add((size // network.group_size, network.group_size))
    return [Torus(*shape) for shape in sorted(shapes) if min(shape) > 1]


def agreed(comm: MPI.Comm, network: LinkModel | str | Path | None, timeout_s: float) -> LinkModel | None:
    """The network that all ranks know, read from a file where it is named; None where no rank names one; collective.

    Raises
    ------
    ValueError
        A rank cannot read it, or ranks know different ones; on every rank.
    """
    known, text, here = None, "", f"rank {comm.rank} of {comm.size}"
    if network is not None:
        try:
            known = network if isinstance(network, LinkModel) else LinkModel.load(network)
            text = repr(known)
        except (OSError, TypeError, ValueError) as error:
            text = f"{_PROBLEM}{here}: network={one_line(network)!r} cannot be used: {one_line(error)}"
    texts = gather_texts(comm, text, timeout_s)
    problem = next((found.removeprefix(_PROBLEM) for found in texts if found.startswith(_PROBLEM)), "")
    if problem:
        raise ValueError(problem)
    if len(set(texts)) > 1:
        other = next(rank for rank, found in enumerate(texts) if found != texts[0])
        raise ValueError(
            f"ranks 0 and {other} know different networks, {texts[0] or 'none'} and {texts[other] or 'none'}: "
            "give all ranks the same"
        )
    return known
