"""Models of a network and of the ranks' processors: the few numbers that predictions of time depend on."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from collectives.annotations import Doubles, Indices
from collectives.atomic_file import replacing
from collectives.json_file import fields as require_fields
from collectives.json_file import read_json
from collectives.quoting import one_line, shown

MOST_BYTES = 1 << 20  # size limit of a file with a network
CURE = "write it with mpicomp advise --save"
_POSITIVE = ("bandwidth_bytes_s", "group_size", "uplink_bytes_s")


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Model of every rank's link and, if ranks form groups, of the link that each group shares to other groups.

    Parameters
    ----------
    latency_s : float
        Seconds from sending a byte to receiving it; messages in flight overlap.
    bandwidth_bytes_s : float
        Bytes per second of each rank's link, in each direction.
    overhead_s : float
        Seconds per message in which the link carries nothing else.
    group_size : int or None
        Ranks 0 to group_size - 1 form the first group, and so on; None puts all ranks in one group.
    between_latency_s : float or None
        Latency of messages between groups, in seconds; None: `latency_s`.
    uplink_bytes_s : float or None
        Bytes per second that the ranks of a group share for messages to other groups, and again for messages from
        them; None: only their own links limit them.

    Raises
    ------
    ValueError
        A time is negative, a bandwidth or the group size not positive, or a number not finite.

    Examples
    --------
    Four ranks, two on each node, which share a link of 10 Gbit/s with 50 us:

    >>> import numpy as np
    >>> import mpicomp
    >>> from collectives import LinkModel
    >>> network = LinkModel(1e-6, 20e9, group_size=2, between_latency_s=50e-6, uplink_bytes_s=1.25e9)
    >>> network.group(np.arange(4))
    array([0, 0, 1, 1])
    >>> network.latencies(np.array([0, 1]), np.array([1, 2]))
    array([1.e-06, 5.e-05])
    >>> comms = mpicomp.run_local(4, lambda comm: str(comm.select(payload_bytes=1_000_000).name), network=network)
    >>> len(set(comms))  # all ranks select the same topology
    1
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

    def group(self, ranks: Indices) -> Indices:
        """Return the number of the group of each of `ranks`, from 0 on."""
        return ranks // self.group_size if self.group_size else np.zeros_like(ranks)

    def latencies(self, sources: Indices, destinations: Indices) -> Doubles:
        """Return the latency in seconds of each message from `sources` to `destinations`, two arrays of ranks."""
        between = self.latency_s if self.between_latency_s is None else self.between_latency_s
        return np.where(self.group(sources) == self.group(destinations), self.latency_s, between)

    def save(self, path: str | Path) -> None:
        """Write the numbers as JSON to the file `path`, which is replaced.

        Raises
        ------
        OSError
            The file cannot be written; it is as before then.
        """
        try:
            with replacing(Path(path)) as file:
                file.write(json.dumps(asdict(self), indent=1).encode() + b"\n")
        except OSError as error:
            cure = "make room there, or name a file in another folder that exists"
            raise OSError(error.errno, f"cannot be written ({error.strerror}): {cure}", str(path)) from error

    @classmethod
    def load(cls, path: str | Path) -> LinkModel:
        """Return the network in a file that `save` or ``mpicomp advise --save`` has written.

        Parameters
        ----------
        path : str or Path

        Raises
        ------
        OSError
            The file cannot be read.
        ValueError
            The file does not hold a network; the message has the file, the cause and the cure in one line.

        Examples
        --------
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from collectives import LinkModel
        >>> with TemporaryDirectory() as folder:
        ...     LinkModel(5e-5, 1.25e9).save(Path(folder, "network.json"))
        ...     LinkModel.load(Path(folder, "network.json")).bandwidth_bytes_s
        1250000000.0
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
class ComputeModel:
    """Model of the processor time that a rank spends on an all-reduce: seconds per element, message and byte."""

    encode_s: float = 0.0
    merge_s: float = 0.0
    decode_s: float = 0.0
    message_s: float = 0.0  # per message sent or received
    byte_s: float = 0.0  # per byte of these
    sharing: float = 1.0  # ranks that share a core and compute at the same time: 2 doubles all times of computing

    def __post_init__(self) -> None:
        if not min(self.encode_s, self.merge_s, self.decode_s, self.message_s, self.byte_s) >= 0:
            raise ValueError(f"times must not be negative: {self}")
        if not self.sharing >= 1:
            raise ValueError(f"sharing must be at least 1 (1 = a core of its own): {self}")
