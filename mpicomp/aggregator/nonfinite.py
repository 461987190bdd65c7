"""Who contributed NaN or infinity, agreed on without comparing floats."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient, Traffic
from collectives.dense.payload import SIXTEEN_BIT
from mpicomp.kernels.cpu.sign import all_finite, all_finite_16

_EXPONENT = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}  # all ones: infinity or NaN


def flags(comm: Communicator, mine: bool, traffic: Traffic | None = None) -> tuple[int, ...]:
    """Ranks that raise their flag; counted into `traffic`."""
    everyone = np.zeros(comm.size, np.uint8)
    request = comm.mpi_comm.Iallgather(np.array([mine], np.uint8), everyone)
    comm.wait(request, lambda: f"rank {comm.rank} of {comm.size}: the ranks' NaN flags do not arrive")
    if traffic is not None:
        traffic.bytes_sent += comm.size - 1
        traffic.messages += comm.size - 1
    return tuple(int(rank) for rank in np.flatnonzero(everyone))


def tell_why(sums: NDArray[np.float64], values: NDArray[Any]) -> None:
    """Overwrite sums over a rank's vector that are not finite by the reason, which other ranks read by `bad_ranks`.

    The reason is NaN where the vector itself holds NaN or infinity, and infinity where finite numbers overflowed.
    """
    sums[:] = np.inf if all_finite(values) else np.nan


def bad_ranks(gathered: NDArray[np.float64]) -> tuple[int, ...]:
    """Ranks whose vectors hold NaN or infinity, from the ranks' sums [ranks, sums] as `tell_why` leaves them."""
    return tuple(int(rank) for rank in np.flatnonzero(np.isnan(gathered).any(axis=1)))


def raise_non_finite(comm: Communicator, mine: bool, where: str) -> NoReturn:
    """Raise on all ranks, naming those that contributed; collective."""
    raise error(comm, flags(comm, mine), where)


def all_finite_result(out: NDArray[Any], dtype: str) -> bool:
    """Whether a result, uint16 for bfloat16, holds neither NaN nor infinity: the same answer on all ranks."""
    if dtype in SIXTEEN_BIT:
        return bool(all_finite_16(out.view(np.uint16), _EXPONENT[dtype]))
    return bool(all_finite(out))


def largest(dtype: str) -> float:
    """The largest number of a type, rounded down."""
    return 3.38e38 if dtype == "bfloat16" else float(np.finfo(dtype).max)


def error(comm: Communicator, ranks: tuple[int, ...], where: str) -> NonFiniteGradient:
    """What every rank raises."""
    who = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}" if ranks else "no rank (the sum overflowed)"
    return NonFiniteGradient(
        f"rank {comm.rank} of {comm.size}: NaN or infinity in {where}, from {who}; lower the learning rate, "
        "clip gradients, or pass nonfinite='skip' where the method has it",
        ranks,
    )
