"""All ranks in one process: threads instead of processes, one memory instead of a network.

`run_local` calls a function on every rank. Its communicators have the same plans, executors, checks and deadlines as
others; only MPI itself is replaced, by `collectives.threads.thread_comm`. So the results have the same bits as under
``mpirun``, except for sums by MPI itself: here these are added in rank order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.communicator.arguments import require_rank
from collectives.errors import CollectiveError, CollectiveMismatch
from collectives.progress.main_thread import run_threads
from collectives.progress.polling import rest_by
from collectives.schedules.plan import Topology
from collectives.schedules.registry import TopologyName
from collectives.threads.thread_comm import Ended, LocalComm, World
from collectives.trace.flight_recorder import recording_as

REPORTING_S = 0.5  # time for all ranks to raise a mismatch after one of them has raised it

_Result = TypeVar("_Result")


def run_local(
    ranks: int,
    function: Callable[[Communicator], _Result],
    topology: TopologyName | Topology = "auto",
    **communicator_options: Any,
) -> list[_Result]:
    """Call a function on several ranks that are threads of this process.

    Use it in tests and examples, and to try a program without ``mpirun``.

    Parameters
    ----------
    ranks : int
        Number of ranks; more than the machine has cores are no problem.
    function : callable
        Called as ``function(comm)`` on all ranks at the same time.
    topology, **communicator_options
        Arguments of `Communicator`.

    Returns
    -------
    list
        Return values of the function, in rank order.

    Raises
    ------
    NotARank
        A rank of MPI has started this process.
    TypeError
        `function` is no function.
    ValueError
        `ranks` is below 1.
    BaseException
        Error of the function, with a note that names the rank: the lowest of those that failed by a cause of their own.
        The other ranks end as soon as they wait.

    Notes
    -----
    The ranks share modules, global random generators and the current folder. Kernels and NumPy run on all cores, Python
    code on one at a time.

    Examples
    --------
    >>> import mpicomp
    >>> mpicomp.run_local(4, lambda comm: comm.allreduce(comm.rank), topology="ring")
    [6, 6, 6, 6]
    """
    require_rank()
    if callable(ranks) or not callable(function):
        raise TypeError("the number of ranks comes first, then the function: write run_local(4, function)")
    if ranks < 1:
        raise ValueError(f"there must be 1 rank or more, not {ranks}")
    world = World(ranks)
    results: dict[int, _Result] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        rest_by(partial(world.rest, rank))
        try:
            with (
                recording_as(rank, ranks),
                Communicator(cast(MPI.Comm, LocalComm(world, rank)), topology, **communicator_options) as comm,
            ):
                results[rank] = function(comm)
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors[rank] = error
            if isinstance(error, CollectiveMismatch):
                # all ranks raise it, and the rank that caused it may raise an error with a better text
                end = time.monotonic() + REPORTING_S
                while len(results) + len(errors) < ranks and time.monotonic() < end:
                    time.sleep(0.001)
            world.end()

    try:
        run_threads(ranks, work, f"rank {{}} of {ranks}")
    except BaseException:
        world.end()
        raise
    if errors:
        rank, error = min(errors.items(), key=lambda one: (isinstance(one[1], CollectiveError), one[0]))
        error.add_note(f"raised on rank {rank} of {ranks}")
        raise error
    return [results[rank] for rank in range(ranks)]
