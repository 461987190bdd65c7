"""What a network and the ranks' processors are like, in a few numbers, as the models of time take them."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from collectives.json_file import fields as require_fields
from collectives.json_file import read_json
from collectives.quoting import one_line, shown

Ints = NDArray[np.int64]
Seconds = NDArray[np.float64]
MOST_BYTES = 1 << 20  # of a file with a network
CURE = "write it with mpicomp advise --save"
_POSITIVE = ("bandwidth_bytes_s", "group_size", "uplink_bytes_s")


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Every rank's link, and, where ranks form groups, the link that each group shares to all others.

    Parameters
    ----------
    latency_s : float
        From a byte's leaving to its arriving; messages in flight overlap.
    bandwidth_bytes_s : float
        Of each rank's link, in each direction.
    overhead_s : float
        Per message, while which the link carries nothing else.
    group_size : int or None
        Group 0 to group_size - 1 form the first group, and so on; None puts all ranks in one.
    between_latency_s : float or None
        For messages between groups; None: as within.
    uplink_bytes_s : float or None
        What the ranks of a group can send to other groups, and receive from them, all together; None: whatever their
        own links carry.

    Raises
    ------
    ValueError
        A time is negative, a bandwidth or the group size not positive, or a number not finite.
    """

    latency_s: float
    bandwidth_bytes_s: float
    overhead_s: float = 0.0
    group_size: int | None = None
    between_latency_s: float | None = None
    uplink_bytes_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, positive = getattr(self, field.name), field.name in _POSITIVE
            if value is None and field.default is None:
                continue
            least = math.ulp(0.0) if positive else 0.0
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and least <= value <= sys.float_info.max):
                wanted = "above 0" if positive else "of 0 or more"
                raise ValueError(f"{field.name} must be a finite number {wanted}, not {shown(value)}")
        if self.group_size is not None and (not isinstance(self.group_size, int) or self.group_size >= 1 << 63):
            raise ValueError(f"group_size must be an integer of at most 64 bits, not {shown(self.group_size)}")

    def group(self, ranks: Ints) -> Ints:
        """Which group each rank is in."""
        return ranks // self.group_size if self.group_size else np.zeros_like(ranks)

    def latencies(self, sources: Ints, destinations: Ints) -> Seconds:
        """Latency of each message."""
        between = self.latency_s if self.between_latency_s is None else self.between_latency_s
        return np.where(self.group(sources) == self.group(destinations), self.latency_s, between)

    def save(self, path: str | Path) -> None:
        """Write the numbers as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> LinkModel:
        """Read what `save` wrote.

        Raises
        ------
        OSError
            The file cannot be read.
        ValueError
            The file does not hold a network; one line with the file, the cause and the cure.
        """
        found = read_json(path, CURE, most_bytes=MOST_BYTES)
        names = sorted(field.name for field in fields(cls))
        try:
            unknown = sorted(set(require_fields(found, latency_s=float, bandwidth_bytes_s=float)) - set(names))
            if unknown:
                raise ValueError(f"{shown(unknown[0])} is none of {', '.join(names)}")
            return cls(**found)
        except ValueError as error:
            raise ValueError(f"{one_line(path)} does not hold a network ({error}); {CURE}") from error


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank computes for an all-reduce.

    Parameters
    ----------
    encode_s, merge_s, decode_s : float
        Per element that is encoded, merged, decoded.
    message_s, byte_s : float
        Of the processor's time per message sent or received, and per byte of it.
    sharing : float
        How many times as long as its processor is busy a rank computes where all do at once: 2 where two share a core.

    Raises
    ------
    ValueError
        A time is negative, or sharing below 1.
    """

    encode_s: float = 0.0
    merge_s: float = 0.0
    decode_s: float = 0.0
    message_s: float = 0.0
    byte_s: float = 0.0
    sharing: float = 1.0

    def __post_init__(self) -> None:
        if not min(self.encode_s, self.merge_s, self.decode_s, self.message_s, self.byte_s) >= 0:
            raise ValueError(f"times must not be negative: {self}")
        if not self.sharing >= 1:
            raise ValueError(f"what is shared with nobody is shared by 1, the least: {self}")
