"""Process group over MPI: its identity, its calls by the names that `torch.distributed` has for them, and its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup, ReduceOp

from collectives import Communicator, CommunicatorClosed
from collectives.execution.uncompiled import keep_methods_uncompiled
from mpicomp.torch.process_group import collective
from mpicomp.torch.process_group.collective import Collective, Operands
from mpicomp.torch.process_group.engine import Engine, Messages
from mpicomp.torch.process_group.members import communicator_of
from mpicomp.torch.process_group.tensor_memory import Operand
from mpicomp.torch.process_group.work import MPIWork

NAME = "mpicomp"
DEVICES = ["cpu", "cuda"]  # AMD's GPUs too
SHORTEST_TIMEOUT = timedelta(milliseconds=1)  # 0 means that a call has no timeout of its own
_log = logging.getLogger("mpicomp")

if TYPE_CHECKING:

    class _Base:
        """`ProcessGroup` without its overloads, which the methods here do not repeat."""

        def __init__(self, rank: int, size: int) -> None: ...
        def rank(self) -> int: ...
        def size(self) -> int: ...
else:
    _Base = ProcessGroup


def _method(row: Collective, root: int | None = None, op: object = None) -> Callable[..., MPIWork]:
    """Return the method of a collective that has inputs and outputs."""

    def run_row(
        self: MPIProcessGroup,
        output: Operand,
        input: Operand,
        opts: object = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = root,
        op: object = op,
    ) -> MPIWork:
        return self._run(row, output, input, opts, timeout, root, op)

    return run_row


@keep_methods_uncompiled
class MPIProcessGroup(_Base):
    """Process group over MPI, for tensors on the CPU and on GPUs, which travel through memory of the host.

    Parameters
    ----------
    store : Store
        Of this group alone.
    rank, size : int
    timeout : timedelta
        A call that has not moved for so long raises `CollectiveTimeout`.
    name : str
        The same on all members.

    Attributes
    ----------
    communicator : Communicator

    Raises
    ------
    CollectiveTimeout
        Some members do not make the group; the error names them.
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
        self._mpi_comm, self._engine = mpi_comm, Engine(self.communicator)
        self._messages = Messages(self._engine, mpi_comm)

    # Identity --------------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - the names that C++ calls
        """Return the name that `init_process_group` takes."""
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name of the group in `torch.distributed`."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:  # for checkpoints in the background, and states of rank 0
        return [torch.device(kind) for kind in DEVICES if kind == "cpu" or torch.cuda.is_available()]

    def _get_sequence_number_for_group(self) -> int:  # for wrappers that look for ranks out of step
        return self._engine.begun

    def _set_sequence_number_for_group(self) -> None:  # calls are counted from the beginning
        pass

    def _get_backend(self, device: torch.device) -> MPIProcessGroup:
        if torch.device(device).type not in DEVICES:
            raise RuntimeError(
                f"{self.communicator.here}: no backend for {device}: the backend mpicomp takes tensors on the CPU and "
                "on GPUs"
            )
        return self

    def get_group_store(self) -> Store:
        """Return the store of this group alone."""
        return self._store

    # Collectives. C++ passes lists of tensors, and options; Python passes tensors and keywords as well. --------------

    def _run(
        self,
        row: Collective,
        outputs: Operand = (),
        inputs: Operand = (),
        opts: object = None,
        timeout: timedelta | None = None,
        root: int | None = None,
        op: object = None,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> MPIWork:
        """Begin a collective; `opts` are PyTorch's options, or the root or operation, and go before keywords."""
        if root is not None:
            root = opts if isinstance(opts, int) else getattr(opts, "rootRank", root)
        if op is not None:
            op = opts if isinstance(opts, ReduceOp | ReduceOp.RedOpType) else getattr(opts, "reduceOp", op)
        timeout = getattr(opts, "timeout", None) if timeout is None else max(timeout, SHORTEST_TIMEOUT)
        return self._engine.run_collective(row, Operands(_list(outputs), _list(inputs), root, op, splits), timeout)

    def broadcast(
        self, tensors: Operand, opts: object = None, timeout: timedelta | None = None, root: int = 0
    ) -> MPIWork:
        """Overwrite a tensor with the root's."""
        return self._run(collective.BROADCAST, tensors, (), opts, timeout, root)

    def allreduce(
        self, tensors: Operand, opts: object = None, timeout: timedelta | None = None, op: object = ReduceOp.SUM
    ) -> MPIWork:
        """Reduce a tensor in place."""
        return self._run(_all_reduce(tensors, collective.ALL_REDUCE), tensors, (), opts, timeout, op=op)

    def allreduce_coalesced(self, tensors: Operand, opts: object = None) -> MPIWork:
        """Reduce tensors in place."""
        return self._run(_all_reduce(tensors, collective.ALL_REDUCE_SEVERAL), tensors, (), opts, op=ReduceOp.SUM)

    def reduce(self, tensors: Operand, opts: object = None, op: object = ReduceOp.SUM, root: int = 0) -> MPIWork:
        """Reduce a tensor in place, on the root."""
        return self._run(collective.REDUCE, tensors, (), opts, root=root, op=op)

    allgather = _method(collective.ALL_GATHER)
    allgather_coalesced = _method(collective.ALL_GATHER_SEVERAL)
    _allgather_base = all_gather_single = _method(collective.ALL_GATHER_SINGLE)
    all_gather_single_coalesced = allgather_into_tensor_coalesced = all_gather_single
    reduce_scatter = _method(collective.REDUCE_SCATTER, op=ReduceOp.SUM)
    _reduce_scatter_base = reduce_scatter_single = _method(collective.REDUCE_SCATTER_SINGLE, op=ReduceOp.SUM)
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = reduce_scatter_single
    gather, scatter = _method(collective.GATHER, root=0), _method(collective.SCATTER, root=0)
    alltoall = _method(collective.ALL_TO_ALL)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: object = None,
    ) -> MPIWork:
        """Send a part of a tensor to every rank and receive one from each."""
        splits = output_split_sizes or (), input_split_sizes or ()
        row = collective.ALL_TO_ALL_SPLIT if any(splits) else collective.ALL_TO_ALL_EVEN
        return self._run(row, output, input, opts, splits=splits)

    alltoall_base = all_to_all_single

    def barrier(self, opts: object = None, timeout: timedelta | None = None) -> MPIWork:
        """Wait for all ranks."""
        return self._run(collective.BARRIER, opts=opts, timeout=timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names all that do not come."""
        self.barrier(timeout=timeout).wait()

    def _start_coalescing(self, device: object) -> None:
        self._engine.start_coalescing()

    def _end_coalescing(self, device: object) -> MPIWork:
        return self._engine.end_coalescing()

    # Messages --------------------------------------------------------------------------------------------------------

    def send(self, tensors: Operand, dstRank: int, tag: int = 0) -> MPIWork:
        """Send a tensor to a rank."""
        return self._messages.start_message("send", tensors, dstRank, tag)

    def recv(self, tensors: Operand, srcRank: int, tag: int = 0) -> MPIWork:
        """Receive a tensor from a rank."""
        return self._messages.start_message("receive", tensors, srcRank, tag)

    def recv_anysource(self, tensors: Operand, tag: int = 0) -> MPIWork:
        """Receive a tensor from any rank."""
        return self._messages.start_message("receive", tensors, None, tag)

    # Life ------------------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time for which a call may not move, of calls in flight too."""
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
        """Return a group of some ranks in the order given, or None if this rank is no member; all ranks call it.

        Raises
        ------
        ValueError
            `ranks` has a rank twice, or one that this group does not have.
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
        store, rank = PrefixStore(f"{name}/", self._store), list(ranks).index(self.rank())
        group = MPIProcessGroup(store, rank, len(ranks), timeout or timedelta(seconds=self.communicator.timeout), name)
        group.setGroupDesc(group_desc or "")
        return group

    splitGroup = split_group  # noqa: N815

    def abort(self) -> None:
        """End all calls in flight, on the other ranks too; the group cannot be used afterwards."""
        comm = self.communicator
        comm.ending.give_up(CommunicatorClosed(f"{comm.here}: the process group was aborted"))

    def shutdown(self) -> None:
        """Wait for the collectives in flight and free MPI's communicators; MPI keeps those of messages in flight."""
        comm = self.communicator
        try:
            comm.close()
        except RuntimeError as error:  # of a dropped work: the other groups must end too
            _log.error("%s: the process group %s ends: %s", comm.here, self._name, error)
            comm.ending.give_up(error)  # if others go on: this rank makes no call any more
        if comm.mpi_comm == MPI.COMM_NULL != self._mpi_comm:  # else messages may be in flight
            self._mpi_comm.Free()


def _list(tensors: Operand) -> Operand:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _all_reduce(tensors: Operand, row: Collective) -> Collective:
    is_sparse = any(isinstance(one, Tensor) and one.layout == torch.sparse_coo for one in _list(tensors))
    return collective.ALL_REDUCE_SPARSE if is_sparse else row
