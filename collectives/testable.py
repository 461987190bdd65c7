"""What can be polled."""

from __future__ import annotations

from typing import Protocol


class Testable(Protocol):
    """Something that can be polled: MPI's requests, exchanges of our own, and what devices have yet to do."""

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """Make progress without waiting; True once it is over."""
        ...
