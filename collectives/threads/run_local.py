"""All ranks in one process: threads instead of processes, one memory instead of a network.

`run_local` calls a function on every rank. The communicators that it hands out are ordinary ones, with the same plans,
executor, checks and deadlines; only MPI itself is replaced, by `collectives.threads.thread_comm`. So whatever is built
on a communicator gives the same bits as under ``mpirun``, except where MPI itself adds: there this adds in rank order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.communicator.arguments import require_rank
from collectives.errors import CollectiveError, CollectiveMismatch
from collectives.progress.polling import rest_by
from collectives.schedules.plan import Topology
from collectives.threads.thread_comm import Ended, LocalComm, World

HEARING_S = 0.5  # how long the ranks may take to hear of a mismatch that one of them knows of

_Result = TypeVar("_Result")


def run_local(
    ranks: int,
    function: Callable[[Communicator], _Result],
    topology: str | Topology = "auto",
    **communicator_options: Any,
) -> list[_Result]:
    """Call a function on several ranks that are threads of this process.

    Parameters
    ----------
    ranks : int
    function : callable
        Called as ``function(comm)`` on every rank, at the same time.
    topology, communicator_options
        Of `Communicator`.

    Returns
    -------
    list
        Results of the function, in rank order.

    Raises
    ------
    NotARank
        This is a process that a rank of MPI has started.
    ValueError
        There is no rank.
    BaseException
        The function's error, with a note that names the rank: the lowest one of those that failed by a cause of their
        own. The others end as soon as they wait for something.

    Notes
    -----
    The ranks share all that processes have of their own: modules, global random generators, current folder. Kernels
    and NumPy work on all processors, Python on one at a time.
    """
    require_rank()
    if ranks < 1:
        raise ValueError(f"there must be 1 rank or more, not {ranks}")
    world = World(ranks)
    results: dict[int, _Result] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        rest_by(partial(world.rest, rank))
        try:
            with Communicator(cast(MPI.Comm, LocalComm(world, rank)), topology, **communicator_options) as comm:
                results[rank] = function(comm)
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by who called
            errors[rank] = error
            if isinstance(error, CollectiveMismatch):  # every rank hears of it, and the rank that caused it says more
                end = time.monotonic() + HEARING_S
                while len(results) + len(errors) < ranks and time.monotonic() < end:
                    time.sleep(0.001)
            world.end()

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank} of {ranks}", daemon=True)
        for rank in range(ranks)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        world.end()
        raise
    if errors:
        rank, error = min(errors.items(), key=lambda one: (isinstance(one[1], CollectiveError), one[0]))
        error.add_note(f"raised on rank {rank} of {ranks}")
        raise error
    return [results[rank] for rank in range(ranks)]
