"""Verdict on whether this process hands memory of GPUs to MPI: from the user's setting, MPI's claims and a probe.

The first array on a GPU that is long enough to matter starts the probe; the verdict then holds for the process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Literal, cast

from mpi4py import MPI

from collectives.arrays.gpu_mpi import claims
from collectives.arrays.gpu_mpi.probe import Outcome, Probe

VARIABLE = "MPICOMP_GPU_MPI"
Mode = Literal["auto", "on", "off"]
UNPROBED = {
    "off": Outcome(works=False, said=f"was not made, as {VARIABLE}=off"),
    "auto": Outcome(works=False, said="was not made, as nothing says that the MPI library takes memory of GPUs"),
}


def mode(environ: Mapping[str, str] = os.environ) -> Mode:
    """Return the user's setting, the environment's ``MPICOMP_GPU_MPI``.

    ``"auto"``: MPI is handed memory of GPUs where its library claims support and a probe confirms it; ``"on"``: it
    must be; ``"off"``: it never is.

    Raises
    ------
    ValueError
        The variable has another value.
    """
    value = environ.get(VARIABLE) or "auto"
    if value not in ("auto", "on", "off"):
        raise ValueError(f"{VARIABLE} is {value!r}: it must be auto, on or off")
    return cast(Mode, value)


class Verdict:
    """Verdict of one process, made at the first request.

    Attributes
    ----------
    outcome : Outcome or None
        None until it is known.
    """

    def __init__(self) -> None:
        self._probe: Probe | None = None
        self._lock = threading.Lock()
        self.outcome: Outcome | None = None

    def begin(self, device: str) -> Probe | None:
        """Return the probe, which starts at the first call with that call's GPU; None where no probe is needed."""
        with self._lock:
            if self.outcome is None and self._probe is None:
                chosen = mode()
                if chosen == "off" or (chosen == "auto" and not claims.are_positive(claims.claims())):
                    self.outcome = UNPROBED[chosen]
                else:
                    self._probe = Probe(device)
            return self._probe

    def end(self) -> Outcome:
        """Return the outcome, once the probe is over."""
        with self._lock:
            if self.outcome is None:
                assert self._probe is not None
                self.outcome = self._probe.wait()
            return self.outcome


verdict = Verdict()
"""Verdict of this process."""


def carries(comm: object) -> bool:
    """Return True if MPI carries the messages of a communicator; those between threads are copied instead."""
    return isinstance(comm, MPI.Comm)


def require_if_on(comm: object) -> None:
    """Require that MPI takes memory of GPUs where the user insists on it.

    Raises
    ------
    ValueError
        It does not, or the environment's ``MPICOMP_GPU_MPI`` has no meaning.
    """
    if mode() == "on" and carries(comm):
        if verdict.outcome is None:
            verdict.begin(current_device())
        outcome = verdict.end()
        if not outcome.works:
            raise ValueError(
                f"{VARIABLE}=on, but MPI cannot be handed memory of GPUs: the probe {outcome.said}. "
                f"Set {VARIABLE}=auto, so that arrays travel through the host's memory where this is so, "
                "or load an MPI library that was built for your GPUs"
            )


def current_device() -> str:
    """Return the GPU that the program has chosen, where PyTorch is loaded; else the first."""
    torch = sys.modules.get("torch")
    return f"cuda:{torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0}"
