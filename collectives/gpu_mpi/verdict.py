"""Whether this process hands memory of GPUs to MPI: asked once, of the first array on a GPU that it matters for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from typing import Any

from mpi4py import MPI

from collectives.execution.handle import Call
from collectives.execution.staged import awaited
from collectives.gpu_mpi import claims
from collectives.gpu_mpi.probe import Outcome, Probe
from collectives.gpu_mpi.settings import VARIABLE, mode

UNPROBED = {
    "off": Outcome(works=False, said=f"was not made, as {VARIABLE}=off"),
    "auto": Outcome(works=False, said="was not made, as nothing says that the MPI library takes memory of GPUs"),
}


class Verdict:
    """The verdict of one process, once somebody has asked for it."""

    def __init__(self) -> None:
        self._probe: Probe | None = None
        self._lock = threading.Lock()
        self.outcome: Outcome | None = None

    def begin(self, device: str) -> Probe | None:
        """The probe of a GPU, or of the one that was asked about first; None where nothing speaks for trying."""
        with self._lock:
            if self.outcome is None and self._probe is None:
                chosen = mode()
                if chosen == "off" or (chosen == "auto" and not claims.are_positive(claims.claims())):
                    self.outcome = UNPROBED[chosen]
                else:
                    self._probe = Probe(device)
            return self._probe

    def end(self) -> Outcome:
        """The outcome, once the probe is over."""
        with self._lock:
            if self.outcome is None:
                assert self._probe is not None
                self.outcome = self._probe.wait()
            return self.outcome


verdict = Verdict()
"""This process's own."""


def carries(comm: Any) -> bool:
    """Whether messages of a communicator are MPI's, and not copied between threads."""
    return isinstance(comm, MPI.Comm)


def allowed(call: Call, device: str) -> Generator[bool, None, bool]:
    """Whether a call may hand memory of a device, such as ``"cuda:1"``, to MPI; the steps in which it is found out."""
    group = call.group
    if not carries(group.mpi_comm):
        return False
    if verdict.outcome is None and (probe := verdict.begin(device)) is not None:
        yield from awaited(call, lambda: probe, f"the probe of MPI with memory of {device} does not end")
    return verdict.end().works


def require_if_on(comm: Any) -> None:
    """Where the user insists on it, see to it that MPI takes memory of GPUs.

    Raises
    ------
    ValueError
        It does not, or the environment's ``MPICOMP_GPU_MPI`` makes no sense.
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
    """The GPU that the program has chosen, where it has PyTorch; else the first."""
    torch = sys.modules.get("torch")
    return f"cuda:{torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0}"
