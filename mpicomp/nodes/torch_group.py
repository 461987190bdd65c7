"""Groups of torch.distributed among the ranks of a node: Gloo in the host's memory, NCCL from GPU to GPU.

The groups are the communicator's own, made from a file that the ranks of a node share: a program needs no process
group, and one that has some is not disturbed. All of them are made by `connect`, where every rank of every node raises
the same error if one of them cannot.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives import CollectiveError, Communicator, PeerFailure
from collectives.annotations import AnyArray, Tensor, Testable, override
from collectives.arrays import HOST_DEVICE, Device, named, wait
from collectives.communicator.nodes import Nodes
from collectives.progress import polling
from collectives.quoting import list_ranks

LONGEST_S = 1e6  # of a call of Gloo or NCCL, whose own timeout would end it behind the call's
CURE = "; or pass local='auto'"
BACKENDS = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
"""Classes of `torch.distributed`."""


class Gpu(NamedTuple):
    """GPU of a rank: its name in PyTorch, and a text that no other GPU has; "" if it is not known."""

    name: str
    identity: str


class TorchGroup:
    """Group of the ranks of a node, in the order of local ranks.

    Parameters
    ----------
    backend : torch.distributed.ProcessGroupGloo or torch.distributed.ProcessGroupNCCL
    device : Device
        Whose memory it takes.
    here : str
        This rank, for messages.
    folder : TemporaryDirectory or None
        Of the file that the group was made from, on one of its ranks.
    """

    def __init__(self, backend: Any, device: Device, here: str, folder: Any = None) -> None:
        self._backend, self.device, self._here, self._folder = backend, device, here, folder

    def exchange(self, source: Tensor, target: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Any:
        """Start an all-to-all: the next `sent[k]` elements go to rank k, and `taken[k]` come from it, in rank order."""
        from torch.distributed import AllToAllOptions

        return self._backend.alltoall_base(target, source, list(taken), list(sent), AllToAllOptions())

    def broadcast(self, part: Tensor, root: int) -> Any:
        """Start to overwrite a vector with that of another rank."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._backend.broadcast([part], options)

    # In the host's memory ---------------------------------------------------------------------------------------------

    def exchange_arrays(
        self, source: AnyArray, target: AnyArray, sent: Sequence[int], taken: Sequence[int]
    ) -> GroupWork:
        """Start an all-to-all of arrays of one type; see `exchange`."""
        size = source.itemsize
        sizes = [size * n for n in sent], [size * n for n in taken]
        return GroupWork(self.exchange(bytes_of(source), bytes_of(target), *sizes), self._here)

    def broadcast_array(self, part: AnyArray, root: int) -> GroupWork:
        """Start to overwrite an array; see `broadcast`."""
        return GroupWork(self.broadcast(bytes_of(part), root), self._here)

    # On a device, as part of its work ---------------------------------------------------------------------------------

    def queue_exchange(self, source: Tensor, target: Tensor, sent: Sequence[int], taken: Sequence[int]) -> None:
        """Exchange vectors on the current stream, in whose order NCCL starts and ends; see `exchange`."""
        self.exchange(source, target, sent, taken).wait()

    def queue_broadcast(self, part: Tensor, root: int) -> None:
        """Overwrite a vector on the current stream; see `broadcast`."""
        self.broadcast(part, root).wait()

    def close(self) -> None:
        """End the group; its folder stays until `clean_up`."""
        self._backend.shutdown()
        # with its store, which looks for its file and then opens it: PyTorch aborts where it has gone in between
        self._backend = None

    def clean_up(self) -> None:
        """Remove the folder, once all ranks have ended the group."""
        if self._folder is not None:
            self._folder.cleanup()


class GroupWork(Testable):
    """Work of Gloo, which threads of its own do.

    Raises
    ------
    PeerFailure
        By `Test`: Gloo has failed.
    """

    __slots__ = ("_here", "_work")

    def __init__(self, work: Any, here: str) -> None:
        self._work, self._here = work, here

    @override
    def Test(self) -> bool:  # noqa: N802 - MPI's name
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()  # at once; it raises the error
        except RuntimeError as error:
            raise PeerFailure(f"{self._here}: Gloo says {error}") from error
        return True


def bytes_of(array: AnyArray) -> Tensor:
    """View an array as a tensor of bytes, also one that must not be written."""
    import ctypes

    import torch

    if array.flags.writeable:
        return torch.from_numpy(array.view(np.uint8))
    # PyTorch warns of read-only memory, though its owner here only reads
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(memory))


# Making ---------------------------------------------------------------------------------------------------------------


def connect(comm: Communicator, nodes: Nodes, kind: str) -> None:
    """Make the groups of all nodes, "gloo" or "nccl", unless they have them; collective among the ranks of `comm`.

    Raises
    ------
    ValueError
        PyTorch, its backend or a GPU is missing on some rank, ranks of a node share a GPU, or a group does not have
        the ranks of its node. Every rank raises it, and nothing is left behind.
    """
    if kind in nodes.groups or max(nodes.sizes) == 1:
        return
    gpu, problem = None, ""
    try:
        require_backend(kind)
        gpu = current_gpu() if kind == "nccl" else None
    except (ImportError, ValueError) as error:
        problem = str(error)
    _require_none(comm, kind, problem)
    if gpu is not None:
        _require_own_gpus(comm, nodes, gpu)
    local = nodes.local
    group: TorchGroup | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None
    try:
        folder, path = _shared_folder(local)
        device = HOST_DEVICE if gpu is None else named(gpu.name)
        group = TorchGroup(_join_backend(kind, path, local, comm.timeout), device, local.here, folder)
        here, members = list(nodes.layout.members), _members_of(group, comm, nodes)
        if members != here:
            problem = f"the group joins {list_ranks(members)}, and the node has {list_ranks(here)}"
    except (RuntimeError, OSError, CollectiveError) as error:
        problem = f"{type(error).__name__}: {error}"
    try:
        _require_none(comm, kind, problem)
    except ValueError:
        # not before: a rank that has yet to open the store would wait minutes for a folder that is gone
        if group is not None:
            group.close()
        local.barrier()
        if folder is not None:
            folder.cleanup()
        raise
    assert group is not None
    nodes.groups[kind] = group


def of(nodes: Nodes, kind: str) -> TorchGroup:
    """Return the group that `connect` has made."""
    group = nodes.groups[kind]
    assert isinstance(group, TorchGroup)
    return group


def require_backend(kind: str) -> None:
    """Raise ImportError or ValueError unless PyTorch is here and has this backend."""
    try:
        from torch import distributed
    except ImportError as error:
        raise ImportError("PyTorch is not installed, whose groups this takes") from error
    if not hasattr(distributed, BACKENDS[kind]):
        raise ValueError(f"this build of PyTorch has no {BACKENDS[kind]}")


def current_gpu() -> Gpu:
    """Return PyTorch's current GPU; raises ValueError if PyTorch finds no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("PyTorch finds no GPU, and NCCL joins GPUs alone")
    index = torch.cuda.current_device()
    return Gpu(f"cuda:{index}", str(getattr(torch.cuda.get_device_properties(index), "uuid", "")))


def make_backend(kind: str, store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Return a group of torch.distributed whose ranks join within the timeout; Gloo's find each other on this host."""
    from torch import distributed

    backend: Any = getattr(distributed, BACKENDS[kind])
    if kind == "gloo":
        options = backend._Options()
        options._devices = [backend.create_device(hostname="127.0.0.1")]
    else:
        options = backend.Options()
    options._timeout = timedelta(seconds=timeout_s)
    made = backend(store, rank, size, options)
    made._set_default_timeout(timedelta(seconds=LONGEST_S))
    return made


def _require_none(comm: Communicator, kind: str, problem: str) -> None:
    """Raise ValueError with the first rank's problem, on all ranks, unless no rank has one."""
    for rank, text in enumerate(comm.allgather_object(problem)):
        if text:
            raise ValueError(f"{comm.here}: local={kind!r} cannot be used: on rank {rank}, {text}{CURE}")


def _require_own_gpus(comm: Communicator, nodes: Nodes, gpu: Gpu) -> None:
    """Raise ValueError on all ranks unless each rank of a node has a GPU of its own."""
    users: dict[tuple[int, str], int] = {}
    for rank, (node, one) in enumerate(comm.allgather_object((nodes.node, tuple(gpu)))):
        first = users.setdefault((node, one[1]), rank)
        if first != rank and one[1]:
            raise ValueError(
                f"{comm.here}: local='nccl' cannot be used: ranks {first} and {rank} of one node have the same GPU, "
                f"{one[0]}; call torch.cuda.set_device(comm.local_rank) first, and start a rank for each GPU{CURE}"
            )


def _shared_folder(local: Communicator) -> tuple[tempfile.TemporaryDirectory[str] | None, str]:
    """Return the path of a folder that the ranks of a node share, and its owner on the rank that has made it."""
    folder, path = None, ""
    if local.rank == 0:
        try:
            folder = tempfile.TemporaryDirectory(prefix="mpicomp-", ignore_cleanup_errors=True)
            path = folder.name
        except OSError as error:
            path = f"\0{error}"  # the other ranks wait for it
    path = local.broadcast_object(path)
    if path.startswith("\0"):
        raise OSError(f"the ranks of this node have no folder to share: {path[1:]}")
    return folder, path


def _join_backend(kind: str, folder: str, local: Communicator, timeout_s: float) -> Any:
    """Return the group that the ranks of a node make from a file in their folder."""
    from torch._C._distributed_c10d import FileStore

    # not a variable of `connect`, where the store would outlive the group and its folder
    store = FileStore(f"{folder}/{kind}", local.size)
    store.set_timeout(timedelta(seconds=timeout_s))
    return make_backend(kind, store, local.rank, local.size, timeout_s)


def _members_of(group: TorchGroup, comm: Communicator, nodes: Nodes) -> list[int]:
    """Return the ranks that a group joins, in its order; its first exchange connects them."""
    size, device = nodes.local.size, group.device
    mine, everyones = np.full(size, comm.rank, np.int64), np.zeros(size, np.int64)
    sizes = [1] * size, [1] * size
    if device is HOST_DEVICE:
        waiting = f"{nodes.local.here}: not all of them join the group"
        polling.wait(group.exchange_arrays(mine, everyones, *sizes), comm.timeout, lambda: waiting)
    else:
        there, landing = device.zeros(size, "int64"), device.zeros(size, "int64")
        sent, landed = device.pinned(8 * size).view(np.int64), device.pinned(8 * size).view(np.int64)
        sent[:] = mine
        device.copy(sent, there)
        device.run(partial(group.queue_exchange, there, landing, *sizes))
        wait(device.copy(landing, landed))
        everyones[:] = landed
    return [int(rank) for rank in everyones]
