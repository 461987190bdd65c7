"""Checks for NaN and infinity whose outcome is the same on all ranks, and their errors."""

from __future__ import annotations

import numpy as np

from collectives import Communicator, NonFiniteGradient
from collectives.annotations import FloatArray
from collectives.arrays.elements import NARROW
from mpicomp import kernels

EXPONENT = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}  # all ones: infinity or NaN


def all_finite(values: FloatArray) -> bool:
    """Return True if a float32 or float64 vector holds neither NaN nor infinity."""
    return bool(kernels.of("cpu").sign.all_finite(values))


def all_finite_result(out: FloatArray, dtype: str) -> bool:
    """Return True if a result, uint16 for bfloat16, holds neither NaN nor infinity; equal on all ranks."""
    if dtype in NARROW:
        return bool(kernels.of("cpu").sign.all_finite_16(out.view(np.uint16), EXPONENT[dtype]))
    return all_finite(out)


def largest(dtype: str) -> float:
    """Return the largest number of a type, rounded down."""
    return 3.38e38 if dtype == "bfloat16" else float(np.finfo(dtype).max)


def error(comm: Communicator, ranks: tuple[int, ...], where: str) -> NonFiniteGradient:
    """Return the error that every rank raises for NaN or infinity."""
    who = _name(ranks) if ranks else "no rank (the sum overflowed)"
    return NonFiniteGradient(
        f"rank {comm.rank} of {comm.size}: NaN or infinity in {where}, from {who}; lower the learning rate, "
        "clip gradients, or pass nonfinite='skip' where the method has it",
        ranks,
    )


def out_of_range(comm: Communicator, ranks: tuple[int, ...], where: str, what: str) -> NonFiniteGradient:
    """Return the error that every rank raises for finite numbers without a code; its attribute `ranks` is empty."""
    return NonFiniteGradient(
        f"rank {comm.rank} of {comm.size}: numbers in {where}, from {_name(ranks)}, are {what}", ()
    )


def _name(ranks: tuple[int, ...]) -> str:
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
