"""Relay: few bits on every hop of a multi-hop all-reduce, each rank keeping the error of its own hop.

Each rank sends its partial sum of a chunk once, and keeps the error of its code. Per step and rank, with update u,
residual e, and for each chunk in the plan's order:

    v = u + e + sum of the decoded partial sums that it received
    send Q(v),   e <- v - Q^-1(Q(v))
    result = Q^-1(Q(v) of the chunk's last rank) / M

So M result + sum of the new e = sum of (u + e): nothing is lost, only late. Q takes the nearest of a few levels times a
scale for each bucket (`mpicomp.codecs.levels`); nothing is drawn.

Prior art: one bit with two means a column around a ring, and an error kept for each hop (Dryden et al., 2016). New are
more levels, any topology, and local steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from collectives import Communicator, Topology
from collectives.annotations import override
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.torus import Torus
from collectives.schedules.tree import DoubleTree
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, Synchronize, VectorSpec
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.levels import Levels
from mpicomp.codecs.options import adopt, choice
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.feedback.relayed_sums import RelayedSums, TensorLevels
from mpicomp.reducers.all_gather import all_gather
from mpicomp.reducers.cascade import Cascade
from mpicomp.spaces import space_at

FEWEST_RANKS = 8  # from which on the errors of a ring count more than the time of another route
MOST_GATHERED = 1 << 16  # elements whose codes are gathered, which gives other bits than hops
BRIEF_ELEMENTS = 1 << 16  # up to here encoding takes less time than accounting for pieces


def quiet_route(size: int) -> Topology:
    """Return the route whose errors grow least, of those that send no more bytes than a ring if there is one."""
    if size & (size - 1) == 0:
        return HalvingDoubling()
    return DoubleTree() if Torus().shape(size)[0] == 1 else Torus()


class _PerPlace(int):
    """The default number of levels, 4, in whose place gradients have 16; a 4 that a user has given stays."""


@method(
    "relay",
    Learned(Grade.PROMISING, "ended where exact means do with 10 local steps, and behind at high rates with momentum"),
    forms=(*({"levels": levels} for levels in (2, 3, 4, 8, 16, 256)), {"coding": "entropy"}),
)
@dataclass(frozen=True)
class Relay(Algorithm):
    """Options of Relay: few bits on every hop, each rank keeping the error of its own hop.

    Updates bear one to two bits, gradients need four. The error grows with the ranks around a ring and with their
    logarithm over halving-doubling, so that topology "auto" takes the latter from 8 ranks on; where their number is no
    power of two, a torus, or a double tree for a prime number.

    Parameters
    ----------
    levels : 2, 3, 4, 8, 16 or 256
        Take 1, 1.6, 2, 3, 4 and 8 bits an element on every hop. The default is 4, for the updates of local optimizers,
        and 16 where `mpicomp.torch` averages gradients: the hooks of DDP and FSDP2, and ``synchronize="gradients"``.
    bucket : int
        Elements that share a scale of 16 bits, counted from the start of each tensor: a multiple of 64, up to 65536.
    residual : "own" or "copy"
        Place of the errors of a rank's codes: a vector of its own, or its copy of the model, from which the next update
        is measured. "copy" takes a vector less of memory, and lets gradients see the pending errors, which one
        bit needs. It requires ``synchronize="updates"``; in a loop of your own, subtract `Aggregator.residual` from the
        copy that the rank goes on with.
    coding : "fixed" or "entropy"
        "entropy" takes 8 to 15 % fewer bytes for the same error, and so much longer to compute that it pays on links of
        a few Mbit/s alone. For 3, 4, 8 and 16 levels.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Dryden, Moon, Jacobs, Van Essen, "Communication quantization for data-parallel training of deep neural networks",
    MLHPC 2016.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def train(comm):
    ...     update = np.random.default_rng(comm.rank).normal(size=64_000).astype(np.float32)
    ...     relay = mpicomp.Relay(levels=4).start(comm, 64_000)
    ...     mean = relay.aggregate(update)
    ...     late = comm.allreduce(relay.residual, "mean")
    ...     exact = comm.allreduce(update, "mean")
    ...     return abs(mean + late - exact).max(), relay.traffic.last.bytes_sent
    >>> error, sent = mpicomp.run_local(4, train, topology="ring")[0]
    >>> bool(error < 1e-6), round(8 * sent / 64_000 / 1.5, 1)  # bits an element on each hop
    (True, 2.1)
    """

    levels: int = _PerPlace(4)
    bucket: int = 128
    residual: Literal["own", "copy"] = "own"
    coding: Literal["fixed", "entropy"] = "fixed"

    def __post_init__(self) -> None:
        choice(self, "residual", ("own", "copy"))
        levels = self.levels
        adopt(self, Levels(self.levels, self.bucket, self.coding))
        if isinstance(levels, _PerPlace):  # which is a number like others for the codec
            object.__setattr__(self, "levels", levels)

    @property
    @override
    def leaves_residual(self) -> bool:
        return self.residual == "copy"

    @override
    def of_gradients(self) -> Algorithm:
        super().of_gradients()
        return replace(self, levels=16) if isinstance(self.levels, _PerPlace) else self

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return self.coding == "fixed"

    synchronize: ClassVar[Synchronize] = "updates"
    uses_tensor_lengths: ClassVar[bool] = True
    """True: buckets are counted from the start of each tensor."""

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Relayed sums x levels x decoding, adding and encoding on every hop."""
        # a rank without a shard has no tensors, and pieces of no length
        lengths = tuple(spec.tensor_lengths) if spec.tensor_lengths else None
        codec = TensorLevels(self.levels, self.bucket, self.coding, lengths)
        buckets = codec.buckets(spec.n)
        nbytes, expected = buckets.nbytes, codec.expected_bytes(spec.n)
        keeps = not self.leaves_residual
        if (
            keeps
            and comm.size > 1
            and comm.routes.gathers(expected)
            and nbytes <= comm.routes.packed_piece_bytes()
            and spec.n <= MOST_GATHERED
        ):
            return all_gather(comm, spec, codec, ErrorFeedback())
        # the program counts buckets: it cuts between them, wherever tensors begin
        model = self.message_model(spec.n, spec.dtype, comm.size, comm.routes.packed_piece_bytes())
        longest = max(1, model.piece_elements // self.bucket)
        topology = comm.select(expected)
        if comm.topology == "auto" and comm.size >= FEWEST_RANKS:
            topology = quiet_route(comm.size)
        program = comm.routes.program(topology, len(buckets.starts), 1, longest)
        sums = RelayedSums(space_at(spec.device), codec, buckets, program, spec.n, spec.dtype, keeps)
        program = replace(program, pieces=tuple(sums.pieces))
        return Parts(sums, Cascade(comm, program, sums.held, sums.landing, spec.n <= BRIEF_ELEMENTS))

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        codec = Levels(self.levels, self.bucket, self.coding)
        of_bucket = codec.nbytes(self.bucket)
        return MessageModel(codec.expected_bytes, max(1, piece_bytes // of_bucket) * self.bucket, self.bucket)
