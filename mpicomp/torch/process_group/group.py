"""The process group: methods that `torch.distributed` calls, each of which begins a call of a communicator."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup, ReduceOp

from collectives import Communicator, CommunicatorClosed
from mpicomp.torch.process_group import operations, sparse
from mpicomp.torch.process_group.bootstrap import communicator_of
from mpicomp.torch.process_group.calls import Calls
from mpicomp.torch.process_group.messages import Messages
from mpicomp.torch.process_group.work import Work

NAME = "mpicomp"
_log = logging.getLogger("mpicomp")


class _Timed(NamedTuple):
    """Options of a call that has nothing but a timeout."""

    timeout: timedelta


_Base: Any = ProcessGroup  # whose overloads a table of operations does not repeat


class MPIProcessGroup(_Base):  # type: ignore[misc]
    """A process group over MPI, for CPU tensors.

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
        self.communicator = Communicator(mpi_comm, timeout=timeout.total_seconds())
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

    def get_group_store(self) -> Store:
        """The store of this group alone."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set after what time calls that do not move raise `CollectiveTimeout`, those in flight too."""
        self.communicator.timeout = timeout.total_seconds()

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
        """
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
        if comm.failure is None:
            self._mpi_comm.Free()

    def _start_coalescing(self, device: object) -> None:
        """Collect the works that follow."""
        self._calls.start_coalescing()

    def _end_coalescing(self, device: object) -> Work:
        """All works since, as one."""
        return self._calls.end_coalescing()

    # Collectives: lists of tensors as c10d passes them, or one tensor ------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, root: int = 0) -> Work:
        """Overwrite tensors with the root's."""
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", root)
        return self._calls.collective("broadcast", operations.broadcast, _list(tensors), root, opts=opts)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, op: Any = ReduceOp.SUM) -> Work:
        """Reduce tensors in place."""
        operands = _list(tensors)
        if len(operands) == 1 and operands[0].layout == torch.sparse_coo:
            return self._calls.collective("all_reduce", sparse.all_reduce, operands[0], _op(opts, op), opts=opts)
        return self._calls.collective("all_reduce", operations.all_reduce, operands, _op(opts, op), opts=opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, op: Any = ReduceOp.SUM, root: int = 0) -> Work:
        """Reduce tensors in place, on the root."""
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", root)
        return self._calls.collective("reduce", operations.reduce_to, _list(tensors), _op(opts, op), root, opts=opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Every rank's tensor, in a list of tensors."""
        one = [[tensor] for tensor in (outputs[0] if isinstance(outputs[0], Sequence) else outputs)]
        return self._calls.collective("all_gather", operations.all_gather, one, _list(inputs), opts=opts)

    def allgather_coalesced(self, outputs: Sequence[Sequence[Tensor]], inputs: Any, opts: Any = None) -> Work:
        """Every rank's tensors, in a list of tensors for each rank."""
        return self._calls.collective("all_gather", operations.all_gather, outputs, _list(inputs), opts=opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Every rank's tensor, or tensors, each in one tensor for all ranks."""
        return self._calls.collective(
            "all_gather", operations.all_gather_single, _list(output), _list(input), opts=opts
        )

    _allgather_base = all_gather_single_coalesced = allgather_into_tensor_coalesced = all_gather_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, op: Any = ReduceOp.SUM) -> Work:
        """Reduce a list of tensors, each rank getting one."""
        one = [[tensor] for tensor in (inputs[0] if isinstance(inputs[0], Sequence) else inputs)]
        return self._calls.collective(
            "reduce_scatter", operations.scatter_reduced, _list(outputs), one, _op(opts, op), opts=opts
        )

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Reduce a tensor, or tensors, each rank getting a part of each."""
        return self._calls.collective(
            "reduce_scatter",
            operations.scatter_reduced_single,
            _list(output),
            _list(input),
            _op(opts, ReduceOp.SUM),
            opts=opts,
        )

    _reduce_scatter_base = reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = reduce_scatter_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Send a tensor to every rank and receive one of each."""
        return self._calls.collective("all_to_all", operations.all_to_all_lists, outputs, inputs, opts=opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Send a part of a tensor to every rank and receive one of each."""
        splits = output_split_sizes or [], input_split_sizes or []
        return self._calls.collective("all_to_all", operations.all_to_all_single, output, input, *splits, opts=opts)

    alltoall_base = all_to_all_single

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0) -> Work:
        """Every rank's tensor, on the root."""
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", root)
        of_all = outputs[0] if outputs and isinstance(outputs[0], Sequence) else outputs
        return self._calls.collective("gather", operations.gather, of_all, _list(inputs)[0], root, opts=opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0) -> Work:
        """A tensor for every rank, from the root."""
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", root)
        of_all = inputs[0] if inputs and isinstance(inputs[0], Sequence) else inputs
        return self._calls.collective("scatter", operations.scatter, _list(outputs)[0], of_all, root, opts=opts)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait for all ranks."""
        return self._calls.collective("barrier", operations.barrier, opts=_Timed(timeout) if timeout else opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names all that do not come."""
        self.barrier(timeout=timeout).wait()

    # Messages --------------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Work:
        """Send a tensor to a rank."""
        return self._calls.message("send", self._calls.messages.send, _list(tensors), dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        return self._calls.message("receive", self._calls.messages.receive, _list(tensors), srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank sends one."""
        return self._calls.message("receive", self._calls.messages.receive, _list(tensors), None, tag)


def _list(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _op(opts: Any, op: Any) -> Any:
    return opts if isinstance(opts, ReduceOp | ReduceOp.RedOpType) else getattr(opts, "reduceOp", op)
