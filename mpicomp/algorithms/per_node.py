"""PerNode: full precision among the ranks of a node, any method between the nodes.

    node r, local rank l:     s_r,l = sum of shard l over the ranks of node r, times R/M
    between nodes, shard l:   d_l   = the method's result for s_1,l ... s_R,l
    result on all M ranks:    d_1 ... d_L

R nodes have M ranks in all; L is the number of ranks of the smallest node. Each rank encodes n/L elements instead of n
and keeps a residual of n/L. Votes and quantization are over R means of nodes instead of M vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, get_args

from collectives import Communicator
from collectives.annotations import override
from collectives.arrays import named
from collectives.communicator.nodes import Nodes
from collectives.nodes.layout import NodeLayout
from mpicomp.aggregator.algorithm import Algorithm, Driver, Parts, VectorSpec
from mpicomp.algorithms.dense import Dense
from mpicomp.algorithms.registry import method
from mpicomp.algorithms.wrapping import WrappingMethod, require_residual
from mpicomp.codecs.options import choice
from mpicomp.feedback.base import Feedback
from mpicomp.nodes import torch_group
from mpicomp.nodes.driver import PerNodeDriver
from mpicomp.nodes.group_sum import DeviceGroupSum, HostGroupSum
from mpicomp.nodes.local_sum import LocalSum, MessageSum, SumTerms
from mpicomp.nodes.shard_feedback import ShardFeedback
from mpicomp.nodes.shards import cut, shard_spec
from mpicomp.nodes.shared_memory_sum import SharedMemorySum

Local = Literal["auto", "shared", "ring", "gloo", "nccl"]
LOCALS: tuple[Local, ...] = get_args(Local)
"""Ways of the sums within a node."""


@dataclass(frozen=True)
class PerNode(WrappingMethod):
    """Exact sums within a node, and a method between the nodes.

    Take it where several ranks share a node and the links between nodes limit training. The bytes that leave a node do
    not depend on its number of ranks, and each rank encodes only its share of the vector.

    Parameters
    ----------
    algorithm : Algorithm or str
        Method between the nodes, or its name, which stands for its defaults.
    local : "auto", "shared", "ring", "gloo" or "nccl"
        Way of the sums within a node: "shared": through memory that its ranks share; "ring": by messages; "auto":
        through shared memory, or by messages, with a warning, where they have no such memory; "gloo" or "nccl": by a
        group of `torch.distributed` that this communicator makes for itself, Gloo's in memory of the host, or NCCL's
        from GPU to GPU, where vectors are then encoded. Results are the same, to the bit.

    Raises
    ------
    ValueError
        `algorithm` is no method, or one that cannot be used between nodes; `local` has another value. By `start`, and
        where an optimizer is made, on all ranks: a rank lacks the library or a GPU of its own that `local` needs; or
        the communicator regroups after the death of a rank, which "gloo" and "nccl" do not.

    Notes
    -----
    With one rank a node it is the method itself, to the bit; on a single node of several ranks it is the exact mean,
    and nothing is encoded. Nodes may differ in their number of ranks. The vector then has as many shards as the
    smallest node has ranks; the other ranks only contribute to sums. Every rank counts the same: the sum of a node is
    multiplied by R/M.

    Between nodes the topology is that of the communicator.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def average(comm):
    ...     two_levels = mpicomp.PerNode(mpicomp.QSGD(levels=7)).start(comm, 3)
    ...     return two_levels.aggregate(np.array([1.0, 2.0, comm.rank], np.float32))
    >>> mpicomp.run_local(4, average)[0]  # four ranks of one node: exact
    array([1. , 2. , 1.5], dtype=float32)
    >>> results = mpicomp.run_local(4, average, ranks_per_node=2)
    >>> bool((results[0] == results[3]).all())
    True
    """

    algorithm: Algorithm | str
    local: Local = "auto"

    equal_within_nodes: ClassVar[bool] = False
    """Flag: the ranks of a node have equal vectors, of which its contribution is one."""

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, str):
            object.__setattr__(self, "algorithm", method(self.algorithm))
        choice(self, "local", LOCALS)
        one = self.algorithm
        if not isinstance(one, Algorithm) or isinstance(one, PerNode):
            raise ValueError(f"algorithm must be a method such as mpicomp.Marsit(), or its name, not {one!r}")
        require_residual(one, "PerNode")
        if one.has_rates_by_position:
            raise ValueError(f"{one!r} has rates by position, which shards of a vector do not have: pass one rate")

    @property
    @override
    def method(self) -> Algorithm:
        """Method between the nodes."""
        assert isinstance(self.algorithm, Algorithm)
        return self.algorithm

    @property
    @override
    def rehearsed(self) -> tuple[Algorithm, ...]:
        return self.method, PerNode(Dense())

    def layout_of(self, comm: Communicator) -> NodeLayout:
        """Return the node of each rank."""
        return comm.layout

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return self.needs_devices and super().encodes_on_devices(dtype)

    @property
    @override
    def needs_devices(self) -> bool:
        return self.local == "nccl"

    @override
    def connect(self, comm: Communicator) -> None:
        layout = self.layout_of(comm)
        if comm.recovery is not None and self.local in ("gloo", "nccl"):
            raise ValueError(
                f"{comm.here}: groups of {self.local} do not outlive their ranks: with on_failure='regroup' pass "
                "local='auto'"
            )
        if len(layout.sizes) < comm.size:
            nodes = comm.nodes_of(layout)
            if self.local in ("gloo", "nccl"):
                torch_group.connect(comm, nodes, self.local)

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Return the parts of the method, for the shard of this rank."""
        return self.assemble(comm, spec)[0]

    @override
    def assemble(self, comm: Communicator, spec: VectorSpec) -> tuple[Parts, Driver]:
        """Return the method's parts for this rank's shard, and a driver of both levels."""
        layout = self.layout_of(comm)
        if len(layout.sizes) == comm.size:
            parts, inner = self.method.assemble(comm, spec)
            feedback = ShardFeedback(parts.feedback, range(spec.n), spec, None)
            return parts._replace(feedback=cast(Feedback, feedback)), inner
        nodes = comm.nodes_of(layout)
        across, rank = nodes.across, nodes.local.rank
        alignment = self.method.shard_alignment(spec.n, spec.dtype)
        shards = cut(spec, nodes.n_shards, alignment)
        shards += (range(spec.n, spec.n),) * (nodes.local.size - nodes.n_shards)
        own = shard_spec(spec, shards[rank], rank, nodes.n_shards, keeps_shapes=alignment is None)
        parts, inner = self.method.assemble(across, own)
        local = self._local_sum(comm, nodes, shards, spec)
        driver = PerNodeDriver(comm, nodes, spec, local, self.method, own, parts, inner, equal=self.equal_within_nodes)
        feedback = ShardFeedback(parts.feedback, shards[rank], spec, driver)
        return parts._replace(feedback=cast(Feedback, feedback)), driver

    def _local_sum(self, comm: Communicator, nodes: Nodes, shards: Sequence[range], spec: VectorSpec) -> LocalSum:
        ranks = nodes.local.size if self.equal_within_nodes else 1
        terms = SumTerms(nodes, shards, spec, comm.size / (len(nodes.sizes) * ranks))
        if self.local == "gloo":
            return HostGroupSum(terms, torch_group.of(nodes, "gloo"))
        if spec.device != "cpu":
            group = torch_group.of(nodes, "nccl")
            if group.device is not named(spec.device):
                problem = f"vectors are on {spec.device}, and the group of NCCL has {group.device.name}"
                cure = "call torch.cuda.set_device before the first of them"
                comm.reject(ValueError(f"{comm.here}, start: {problem}: {cure}"), "start")
            return DeviceGroupSum(terms, group)
        # also for "nccl" on ranks whose device is full, which start again with the tags of the others
        return (SharedMemorySum if self.local in ("auto", "shared") else MessageSum)(terms)


def method_of(algorithm: object) -> Any:
    """Return the method between nodes of `PerNode`, or the algorithm itself."""
    return algorithm.method if isinstance(algorithm, PerNode) else algorithm
