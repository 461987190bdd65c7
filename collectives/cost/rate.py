"""Rates of links, and how they are written."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_WRITTEN = re.compile(r"([\d.]+)\s*(kbit|mbit|gbit)", re.IGNORECASE)
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"([\d.]+)\s*(us|ms|s)", re.IGNORECASE)


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


@dataclass(frozen=True)
class EmulatedLink:
    """Link that messages are held back by; `Communicator` takes it or its text as ``link``.

    Parameters
    ----------
    rate : Rate
        Rate in each direction.
    latency_s : float
        Seconds that a message takes longer than its bytes.

    Examples
    --------
    >>> import mpicomp
    >>> link = mpicomp.run_local(2, lambda comm: comm.link, link="1gbit,50us")[0]
    >>> str(link), link.bytes_per_s
    ('1 Gbit/s, 50 us', 125000000.0)
    >>> link == type(link).parse("1gbit, 50us")
    True
    """

    rate: Rate
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> EmulatedLink:
        """Return the link of a text.

        Parameters
        ----------
        text : str
            A rate in kbit, mbit or gbit per second, and perhaps a latency in us, ms or s: ``"100mbit"``,
            ``"1gbit,50us"``.

        Raises
        ------
        ValueError
            The text is neither a rate nor a rate and a latency.
        """
        rate, _, latency = text.partition(",")
        found = _TIME.fullmatch(latency.strip())
        try:
            link = cls(Rate.parse(rate), float(found[1]) * _TIMES[found[2].lower()] if found else 0.0)
            if (found is not None or "," not in text) and link.rate.bits_per_s is not None and link.latency_s <= 1:
                return link
        except ValueError:
            pass
        raise ValueError(
            f"{text!r} is no link: write a rate, such as 100mbit or 2.5gbit, or a rate and a latency of at most 1 s, "
            "such as 1gbit,50us"
        )

    @property
    def bytes_per_s(self) -> float:
        """Bytes that travel each second in each direction."""
        assert self.rate.bits_per_s is not None
        return self.rate.bits_per_s / 8

    def __str__(self) -> str:
        latency = f", {self.latency_s * 1e6:g} us" if self.latency_s else ""
        return f"{self.rate}{latency}"
