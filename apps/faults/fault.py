"""One failure as data: its kind, its rank, its step, and the phase of the step in which it happens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Phase of a step, in the order in which a rank passes them; a phase that it does not pass counts as the next."""

    BEFORE_CALL = "before-call"
    CALL_CHECK = "call-check"  # the first message by which the ranks compare the call has been sent
    FIRST_MESSAGE = "first-message"  # the first message behind the comparison has been sent
    MIDDLE = "middle"  # half of the messages of the call have been sent
    BEFORE_BARRIER = "before-barrier"  # this rank's part is complete; see the commit rule in docs/faults.md
    AFTER_BARRIER = "after-barrier"  # all ranks' parts are complete, and nothing has changed yet
    RESIDUAL = "residual"  # the residual is new, and the step is not counted yet
    BETWEEN_STEPS = "between-steps"
    CHECKPOINT = "checkpoint"  # a state has been written, and has not taken the place of the last one

    @property
    def place(self) -> int:
        """Number of the phase in a step, from 0 on."""
        return _PLACE[self]


_PLACE = {phase: place for place, phase in enumerate(Phase)}


class Kind(StrEnum):
    """Kind of failure."""

    KILL = "kill"
    LATE_KILL = "late-kill"  # SIGKILL some seconds later, wherever the rank is then
    STOP = "stop"  # SIGSTOP, and SIGCONT after some seconds
    SLOW = "slow"  # the rank sleeps
    CORRUPT = "corrupt"  # a bit of the next message is flipped
    DISK_FULL = "disk-full"  # the next file of a state cannot be written: ENOSPC


KILLS = (Kind.KILL, Kind.LATE_KILL)
TIMED = (Kind.LATE_KILL, Kind.STOP, Kind.SLOW)
_FORM = "KIND:RANK:STEP:PHASE, with :SECONDS behind that of a late-kill, stop or slow and :BIT behind that of a corrupt"


@dataclass(frozen=True)
class Fault:
    """A failure of one rank; `str` and `parse` are inverse.

    Parameters
    ----------
    kind : Kind
    rank : int
        Rank in COMM_WORLD.
    step : int
        From 0 on.
    phase : Phase
    seconds : float
        Duration of a stop or of slowness, or time until a late kill.
    bit : int
        Number of the bit of a message that is flipped, modulo the message's length.

    Raises
    ------
    ValueError
        A number is negative, or a late kill, stop or slowness takes no time.

    Examples
    --------
    >>> from apps.faults import Fault, fail_at
    >>> str(fail_at(3, 5, "middle")), Fault.parse("stop:0:2:before-call:1.5").seconds
    ('kill:3:5:middle', 1.5)
    """

    kind: Kind
    rank: int
    step: int
    phase: Phase
    seconds: float = 0.0
    bit: int = 0

    def __post_init__(self) -> None:
        if self.rank < 0 or self.step < 0 or self.bit < 0:
            raise ValueError(f"rank, step and bit of a fault are 0 or more, got {self.rank}, {self.step}, {self.bit}")
        if self.kind in TIMED and not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds of a {self.kind} must be above 0 and finite, got {self.seconds}")

    def __str__(self) -> str:
        text = f"{self.kind}:{self.rank}:{self.step}:{self.phase}"
        if self.kind in TIMED:
            return f"{text}:{self.seconds!r}"
        return f"{text}:{self.bit}" if self.kind is Kind.CORRUPT else text

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return the fault that `str` has written as this text; ValueError names the form."""
        kinds, phases = "|".join(Kind), "|".join(Phase)
        found = re.fullmatch(rf"({kinds}):(\d+):(\d+):({phases})(?::([\d.e+-]+))?", text.strip())
        try:
            if found is None:
                raise ValueError(f"a fault is {_FORM}; kinds {kinds}; phases {phases}")
            kind, amount = Kind(found[1]), found[5]
            if (amount is None) is (kind in TIMED or kind is Kind.CORRUPT):
                raise ValueError(f"a fault is {_FORM}")
            timed, bit = kind in TIMED, kind is Kind.CORRUPT
            return cls(
                kind, int(found[2]), int(found[3]), Phase(found[4]),
                float(amount) if timed else 0.0, int(amount) if bit else 0,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None


def fail_at(rank: int, step: int, phase: Phase | str = Phase.BEFORE_CALL) -> Fault:
    """Kill a rank by SIGKILL."""
    return Fault(Kind.KILL, rank, step, Phase(phase))


def stop_at(rank: int, step: int, phase: Phase | str, seconds: float) -> Fault:
    """Stop a rank by SIGSTOP, and let it go on after some seconds."""
    return Fault(Kind.STOP, rank, step, Phase(phase), seconds=seconds)


def slow_at(rank: int, step: int, phase: Phase | str, seconds: float) -> Fault:
    """Let a rank sleep outside of MPI."""
    return Fault(Kind.SLOW, rank, step, Phase(phase), seconds=seconds)


def corrupt_at(rank: int, step: int, phase: Phase | str, bit: int = 0) -> Fault:
    """Flip a bit of the next message that a rank sends from this phase on."""
    return Fault(Kind.CORRUPT, rank, step, Phase(phase), bit=bit)


def disk_full_at(rank: int, step: int) -> Fault:
    """Let the disk be full when a rank writes its next state."""
    return Fault(Kind.DISK_FULL, rank, step, Phase.CHECKPOINT)
