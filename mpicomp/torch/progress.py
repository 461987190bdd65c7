"""Communication while backward computes."""

from __future__ import annotations

import logging

from collectives import Communicator

_log = logging.getLogger("mpicomp")
_warned = False


def overlap_by_thread(comm: Communicator, on_device: bool = False) -> bool:
    """Give the communicator a progress thread; where there is none, return False, and say once what happens instead.

    on_device : whether the model is on a device.
    """
    global _warned
    started = comm.start_progress_thread()
    if not started and comm.lacks_thread_support and not _warned:
        _warned = True
        _log.warning(
            "%s: MPI was started without MPI_THREAD_MULTIPLE, so that communication goes on only %s; start it by "
            "mpi4py.rc.thread_level = 'multiple', the default",
            comm.here, "in step()" if on_device else "where backward calls hooks"
        )  # fmt: skip
    return started
