"""The process group: what it is, and how it begins and ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup

from collectives import Communicator, CommunicatorClosed
from collectives.compiling import keep_methods_uncompiled
from mpicomp.torch.process_group.bootstrap import communicator_of
from mpicomp.torch.process_group.calls import Calls
from mpicomp.torch.process_group.messages import Messages
from mpicomp.torch.process_group.methods import Methods

NAME = "mpicomp"
DEVICES = ["cpu", "cuda"]  # AMD's GPUs too
_log = logging.getLogger("mpicomp")


_Base: Any = ProcessGroup  # whose overloads `Methods` does not repeat


@keep_methods_uncompiled
class MPIProcessGroup(Methods, _Base):  # type: ignore[misc]
    """A process group over MPI, for tensors on the CPU and on GPUs, which travel through memory of the host.

    Parameters
    ----------
    store : Store
        Of this group alone.
    rank, size : int
    timeout : timedelta
        After which a call that does not move raises `CollectiveTimeout`.
    name : str
        The same on all members.

    Attributes
    ----------
    communicator : Communicator
        What the calls go through.

    Raises
    ------
    CollectiveTimeout
        Names the members that do not make the group too.
    RuntimeError
        The MPI library does not allow several threads.
    ValueError
        MPI has started fewer ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)  # C++ lets a subclass have no store: see get_group_store
        self._store, self._name, self._description, self._splits = store, name, "", 0
        mpi_comm = communicator_of(store, rank, size, timeout, name)
        seconds = timeout.total_seconds()
        self.communicator = Communicator(mpi_comm, timeout=seconds, arrival_timeout=seconds)
        if not self.communicator.start_progress_thread():
            raise RuntimeError(
                f"{self.communicator.here}: MPI runs with thread level {MPI.Query_thread()} and needs "
                f"MPI_THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}): leave mpi4py.rc.thread_level at 'multiple', or use "
                "an MPI library that is built for threads"
            )
        self._mpi_comm, self._calls = mpi_comm, Calls(self.communicator, Messages(mpi_comm))

    # What a group is -------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - the names that C++ calls
        """What `init_process_group` takes."""
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        """The name that `torch.distributed` knows the group by."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """A description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:  # asked by saving in the background, and by states of rank 0
        return [torch.device(kind) for kind in DEVICES if kind == "cpu" or torch.cuda.is_available()]

    def _get_sequence_number_for_group(self) -> int:  # asked by wrappers that look for ranks out of step
        """How many collectives have been begun."""
        return self._calls.begun

    def _set_sequence_number_for_group(self) -> None:
        """Count from now on: the calls are counted anyway."""

    def _get_backend(self, device: torch.device) -> MPIProcessGroup:
        """What carries out calls of tensors on this device: the group itself."""
        if torch.device(device).type not in DEVICES:
            raise RuntimeError(
                f"{self.communicator.here}: no backend for {device}: the backend mpicomp takes tensors on the CPU and "
                "on GPUs"
            )
        return self

    def get_group_store(self) -> Store:
        """The store of this group alone."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set after what time calls that do not move raise `CollectiveTimeout`, those in flight too."""
        self.communicator.timeout = self.communicator.arrival_timeout = timeout.total_seconds()

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        options: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> MPIProcessGroup | None:
        """A group of some of this group's ranks, in the order given; all ranks of this group call it.

        Returns
        -------
        MPIProcessGroup or None
            None: this rank is no member.

        Raises
        ------
        ValueError
            `ranks` are no ranks of this group.
        """
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size())):
            raise ValueError(
                f"{self.communicator.here}, split_group: the ranks are {list(ranks)}: pass ranks from 0 to "
                f"{self.size() - 1}, each once"
            )
        self._splits += 1
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._name}:split:{self._splits}:{ranks[0]}"
        seconds = timedelta(seconds=self.communicator.timeout)
        group = MPIProcessGroup(
            PrefixStore(f"{name}/", self._store), list(ranks).index(self.rank()), len(ranks), timeout or seconds, name
        )
        group.setGroupDesc(group_desc or "")
        return group

    splitGroup = split_group  # noqa: N815

    def abort(self) -> None:
        """End all calls in flight, on the other ranks too; nothing can be done with the group afterwards."""
        comm = self.communicator
        comm.give_up(CommunicatorClosed(f"{comm.here}: the process group was aborted"))

    def shutdown(self) -> None:
        """Wait for the collectives in flight, and give back what MPI has lent; messages in flight are left to MPI."""
        comm = self.communicator
        try:
            comm.close()
        except RuntimeError as error:  # of a work that nobody waited for: the other groups must end too
            _log.error("%s: the process group %s ends: %s", comm.here, self._name, error)
            comm.give_up(error)  # if others go on: this rank comes to nothing more
        if comm.mpi_comm == MPI.COMM_NULL != self._mpi_comm:  # else messages may be in flight
            self._mpi_comm.Free()
