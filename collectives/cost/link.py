"""What a network and the ranks' processors are like, in a few numbers, as the models of time take them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Seconds = NDArray[np.float64]


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
        times = (self.latency_s, self.overhead_s, self.between_latency_s or 0.0)
        speeds = (self.bandwidth_bytes_s, self.uplink_bytes_s, self.group_size)
        numbers = [self.bandwidth_bytes_s, *(number for number in (*times, *speeds) if number is not None)]
        if (
            any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers)
            or not all(math.isfinite(number) for number in numbers)
            or min(times) < 0
            or any(speed is not None and speed <= 0 for speed in speeds)
            or not (self.group_size is None or isinstance(self.group_size, int))
        ):
            raise ValueError(
                f"times must not be negative, bandwidths and group size must be positive, all finite numbers: {self}"
            )

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
            It does not hold a network.
        """
        cure = "write it with mpicomp advise --save"
        try:
            found: Any = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); {cure}") from error
        names = {field.name for field in fields(cls)}
        required = {"latency_s", "bandwidth_bytes_s"}
        if not isinstance(found, dict) or not required <= set(found) <= names:
            raise ValueError(f"{path} does not hold a network, which has {', '.join(sorted(names))}; {cure}")
        try:
            return cls(**found)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold a network: {error}; {cure}") from error


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
