"""How long ranks wait for each other: what the caller says, else the environment, else the default."""

from __future__ import annotations

import os

SILENCE_S = 60.0  # within a collective, where all ranks are at work
ARRIVAL_S = 1800.0  # of a rank that evaluates or saves while the others wait in their next call


def timeouts(timeout: float | None, arrival_timeout: float | None) -> tuple[float, float]:
    """Both timeouts of a communicator, in seconds; see `Communicator`.

    Raises
    ------
    TypeError, ValueError
        One is no positive number; says where it comes from.
    """
    silence_s = _seconds("timeout", timeout, SILENCE_S)
    return silence_s, _seconds("arrival_timeout", arrival_timeout, max(ARRIVAL_S, silence_s))


def _seconds(name: str, given: float | None, default: float) -> float:
    source, value = name, given if given is not None else ""
    if given is None:
        source = f"MPICOMP_{name.upper()}"
        value = os.environ.get(source) or default
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise _error(TypeError if given is not None else ValueError, source, value) from None
    if not seconds > 0:
        raise _error(ValueError, source, value)
    return seconds


def _error(kind: type[Exception], source: str, value: object) -> Exception:
    return kind(f"{source} is {value!r}: it must be a positive number of seconds, such as 60 or inf")
