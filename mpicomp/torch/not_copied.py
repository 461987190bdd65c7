"""What communicates belongs to its process, and to the others' at the same place in their programs."""

from __future__ import annotations

from typing import NoReturn

from collectives import Communicator


class NotCopied:
    """Refuses to be copied or pickled: a copy would have lost half of what makes it up."""

    comm: Communicator

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # by which copy and pickle take any object
        raise TypeError(
            f"{self.comm.here}: {type(self).__name__}, which communicates, is not copied or pickled; copy or save its "
            "state_dict(), or leave it out"
        )
