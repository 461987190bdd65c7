"""Link rates: how they are written, and how a link is held to one."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_WRITTEN = re.compile(r"([\d.]+)\s*(kbit|mbit|gbit)", re.IGNORECASE)
# More than the 64 KiB and headers that TCP hands down at once: else the bucket cuts them into packets and, with a timer
# for each, does not reach the rate.
SMALLEST_BURST_BYTES = 80_000
BURST_S = 1e-3  # a larger bucket hides the limit from short messages
QUEUE_S = 0.05
SMALLEST_QUEUE_BYTES = 1_000_000


@dataclass(frozen=True)
class Rate:
    """Rate of a link in one direction; None: as fast as the machine copies."""

    bits_per_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Rate:
        """``"1gbit"``, ``"100mbit"``, ``"2.5gbit"``, or ``"none"``: not limited. ValueError for other texts."""
        if text.lower() in ("none", "unlimited"):
            return cls()
        found = _WRITTEN.fullmatch(text.strip())
        try:
            bits_per_s = float(found[1]) * UNITS[found[2].lower()] if found else 0.0
        except ValueError:
            bits_per_s = 0.0
        if not 1e4 <= bits_per_s <= 1e12:
            raise ValueError(f"{text!r} is no rate: write 100mbit, 1gbit, 2.5gbit or none")
        return cls(bits_per_s)

    def __str__(self) -> str:
        if self.bits_per_s is None:
            return "unlimited"
        unit = next((unit for unit in ("gbit", "mbit") if self.bits_per_s >= UNITS[unit]), "kbit")
        return f"{self.bits_per_s / UNITS[unit]:g} {unit[0].upper() if unit != 'kbit' else 'k'}bit/s"

    @property
    def token_bucket(self) -> list[str]:
        """Arguments of ``tc qdisc add dev ... `` that hold a device's egress to this rate.

        The bucket holds the bytes of a millisecond; the queue is long enough that TCP need not drop.
        """
        assert self.bits_per_s is not None
        burst = max(SMALLEST_BURST_BYTES, round(self.bits_per_s / 8 * BURST_S))
        queue = max(SMALLEST_QUEUE_BYTES, round(self.bits_per_s / 8 * QUEUE_S))
        return ["tbf", "rate", f"{self.bits_per_s:.0f}bit", "burst", f"{burst}", "limit", f"{burst + queue}"]
