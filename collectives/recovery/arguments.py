"""Arguments of a communicator for the time after the death of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

from mpi4py import MPI

from collectives.recovery.fault_tolerance import CURE, is_tolerant


def validate_on_failure(on_failure: str, parent: MPI.Comm) -> bool:
    """Return whether survivors regroup; raises ValueError."""
    if on_failure not in ("raise", "regroup"):
        raise ValueError(f"on_failure is {on_failure!r}: choose 'raise' or 'regroup'")
    if on_failure == "regroup" and parent.size > 1 and not is_tolerant(parent):
        raise ValueError(f"on_failure='regroup' needs an MPI whose ranks outlive others: {CURE}")
    return on_failure == "regroup"


def validate_spares(spares: object, on_failure: str, parent: MPI.Comm, others: Mapping[str, object]) -> int:
    """Return the number of ranks that wait; raises TypeError or ValueError.

    `others` are arguments that cannot be combined with ranks that wait.
    """
    if isinstance(spares, bool) or not isinstance(spares, Integral):
        raise TypeError(f"spares must be a whole number, not {spares!r}")
    if not 0 <= int(spares) < parent.size:
        raise ValueError(f"spares must lie in 0 .. {parent.size - 1}, since a rank has to train, not {spares}")
    if spares and on_failure != "regroup":
        raise ValueError(f"spares={spares} need on_failure='regroup': without it the job ends with the first dead rank")
    given = [name for name, option in others.items() if option is not None]
    if spares and given:
        raise ValueError(f"spares={spares} cannot be combined with {given[0]}: leave one out")
    return int(spares)


def validate_copies(every: object, on_failure: str) -> int | None:
    """Return the steps between copies of residuals, None without them; raises TypeError or ValueError."""
    if every is None:
        return None
    if isinstance(every, bool) or not isinstance(every, Integral):
        raise TypeError(f"copy_residuals_every must be a number of steps or None, not {every!r}")
    if every < 1:
        raise ValueError(f"copy_residuals_every must be at least 1, not {every}")
    if on_failure != "regroup":
        raise ValueError("copy_residuals_every has no use without on_failure='regroup': pass both, or neither")
    return int(every)
