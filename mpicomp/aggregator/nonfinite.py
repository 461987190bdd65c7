"""NaN and infinity, agreed on without comparing floats."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient
from collectives.arrays.elements import SIXTEEN_BIT
from mpicomp import kernels

_EXPONENT = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}  # all ones: infinity or NaN


def all_finite(values: NDArray[Any]) -> bool:
    """Whether a float32 or float64 vector holds neither NaN nor infinity."""
    return bool(kernels.of("cpu").sign.all_finite(values))


def all_finite_result(out: NDArray[Any], dtype: str) -> bool:
    """Whether a result, uint16 for bfloat16, holds neither NaN nor infinity: the same answer on all ranks."""
    if dtype in SIXTEEN_BIT:
        return bool(kernels.of("cpu").sign.all_finite_16(out.view(np.uint16), _EXPONENT[dtype]))
    return all_finite(out)


def largest(dtype: str) -> float:
    """The largest number of a type, rounded down."""
    return 3.38e38 if dtype == "bfloat16" else float(np.finfo(dtype).max)


def error(comm: Communicator, ranks: tuple[int, ...], where: str) -> NonFiniteGradient:
    """What every rank raises."""
    who = _named(ranks) if ranks else "no rank (the sum overflowed)"
    return NonFiniteGradient(
        f"rank {comm.rank} of {comm.size}: NaN or infinity in {where}, from {who}; lower the learning rate, "
        "clip gradients, or pass nonfinite='skip' where the method has it",
        ranks,
    )


def out_of_range(comm: Communicator, ranks: tuple[int, ...], where: str, what: str) -> NonFiniteGradient:
    """What every rank raises of finite numbers, so that it names no rank as an attribute."""
    return NonFiniteGradient(
        f"rank {comm.rank} of {comm.size}: numbers in {where}, from {_named(ranks)}, are {what}", ()
    )


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
