"""Steps in two levels: a sum within each node, the steps of a method between nodes, and the results for all ranks.

    local rank l of node r:   s_r,l = sum over the node's ranks of shard l  *  R / M     (with equal nodes their mean)
    between nodes:            d_l   = the method's result for s_1,l ... s_R,l
    result:                   d_1 ... d_L

The mean over R nodes of s is the mean over M ranks. A single node has no method to run: its result is the exact mean.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from collectives import CollectiveMismatch, Communicator, NonFiniteGradient
from collectives.annotations import Array, FloatArray, override
from collectives.communicator.nodes import Nodes
from collectives.consistency.descriptions import fingerprint
from collectives.execution.call import Steps
from mpicomp.aggregator.algorithm import Algorithm
from mpicomp.aggregator.call import CallText, VectorCall
from mpicomp.aggregator.parts import Driver, Parts
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.auto.chosen import Pending
from mpicomp.feedback.base import bad_ranks
from mpicomp.nodes.local_sum import BAD, FINE, LocalSum
from mpicomp.spaces import space_at

_EXACT = 1 << 52  # integers below it are exact as float64


def _of_outer(name: str) -> Any:
    """Return an attribute that a call within another one shares with it."""

    def read(call: ShardCall) -> Any:
        return getattr(call.outer, name)

    def write(call: ShardCall, value: object) -> None:
        setattr(call.outer, name, value)

    return property(read, write)


class ShardCall(VectorCall):
    """Call of a method between nodes, which is a part of another call and advances with it.

    Parameters
    ----------
    outer : VectorCall
    text : CallText
        Its `group` are the owners of the shard.
    values : FloatArray or None
        Sum of the node; None: `read` computes it.
    out : array
        Overwritten with the result.
    read : callable or None
        See `VectorCall`.
    """

    wait_name = _of_outer("wait_name")
    owners = _of_outer("owners")
    arrival = _of_outer("arrival")
    rest_meanwhile = _of_outer("rest_meanwhile")
    idle_turns = _of_outer("idle_turns")
    waited_s = _of_outer("waited_s")
    background = _of_outer("background")
    note = _of_outer("note")

    def __init__(
        self,
        outer: VectorCall,
        text: CallText,
        values: FloatArray | None,
        out: Array,
        read: Callable[[range], FloatArray] | None = None,
    ) -> None:
        self.outer = outer
        describe = outer.describe
        super().__init__(text, outer.step, outer.user, values, None, out, outer.traffic)
        self.read = read
        self.tag = text.tag
        outer.describe = describe
        self.thread = outer.thread
        if text.spec.is_narrow:
            self.wide = values
        self.accepts_packed = read is not None

    @property
    def describe(self) -> Callable[[], str]:
        """Description of the wait. Ranks have their numbers between nodes in it, so this rank's place comes first."""
        return self.outer.describe

    @describe.setter
    def describe(self, describe: Callable[[], str]) -> None:
        is_placed = isinstance(describe, partial) and describe.func is _placed
        self.outer.describe = describe if is_placed else partial(_placed, self.group.here, describe)

    @override
    def moved(self) -> None:
        self.outer.moved()

    @override
    def turn(self) -> Steps:
        return self.outer.turn()

    @property
    @override
    def is_alone(self) -> bool:
        return self.outer.is_alone


class PerNodeDriver(Driver):
    """Driver of steps in two levels.

    Parameters
    ----------
    comm : Communicator
    nodes : Nodes
    spec : VectorSpec
        Description of the whole vectors.
    local : LocalSum
    method : Algorithm
        The method between nodes.
    shard : VectorSpec
        Description of this rank's shard.
    parts : Parts
    inner : Driver
        The method's parts and driver, of this rank's shard.
    equal : bool
        Vectors are equal on all ranks of a node, and are not summed there.
    """

    def __init__(
        self,
        comm: Communicator,
        nodes: Nodes,
        spec: VectorSpec,
        local: LocalSum,
        method: Algorithm,
        shard: VectorSpec,
        parts: Parts,
        inner: Driver,
        equal: bool = False,
    ) -> None:
        self._local, self._inner, self._equal = local, inner, equal
        self._is_open = False
        self._text = CallText(
            nodes.across, method, shard, nodes.across.fixed_tag(), f"aggregate between nodes by {method}"
        )
        self._between = len(nodes.sizes) > 1
        self._channel = SideChannel(comm, 1)
        self._feedback: Any = parts.feedback
        self._pending = Pending(parts.feedback, 1, space_at(spec.device))
        self._places, self._shard_number = nodes.layout.places, nodes.local.rank
        self._skips = method.nonfinite == "skip"
        self.prepares = self._between and inner.prepares
        self._adds_pending = False  # in the step of a single node that is made, or was made last
        self.has_pending = False
        """Flag: the feedback was loaded, so that a single node has errors to add to the next mean."""
        self.restored = ""
        """Description of a loaded state, which the owners of a shard compare in the next step."""

    @override
    def prepare(self, step: int) -> None:
        self._inner.prepare(step)

    @property
    @override
    def can_undo(self) -> bool:
        return self._inner.can_undo if self._between else not self._adds_pending

    @override
    def undo(self) -> None:
        if self._between:
            self._inner.undo()

    @override
    def commit(self) -> None:
        if self._between:
            self._inner.commit()
        elif self._adds_pending:
            self._pending.reset_method()
            self.has_pending = False

    @override
    def roll_back(self) -> None:
        if self._between:
            self._inner.roll_back()

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        if not self._is_open:
            self._local = yield from self._local.opened(call)
            self._is_open = True
        if self.restored:
            yield from self._compare_restored(call)
        local, values = self._local, call.values
        local.begin(call.out, values)
        try:
            with _span(call, "local", "local sum"):
                finite = yield from self._sum(call, values)
            with _span(call, "node", "between nodes"):
                exchange = self._exchange if self._between else self._mean_of_node
                outcome = yield from exchange(call, finite)
            with _span(call, "local", "local gather"):
                worst = yield from local.gather(call, call.out, outcome)
        finally:
            local.end()
        if worst == BAD:
            yield from self._raise(call)

    def _sum(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool | None]:
        """Sum the shard; returns whether the node's sums are finite, or None if the method reads them by pieces."""
        local = self._local
        if self._equal:
            return (yield from local.take(call, values))
        if self._between and local.reads_pieces and self._inner.reads_pieces(call.step) and call.group.workers is None:
            yield from local.share(call, values)
            return None
        return (yield from local.reduce(call, values))

    def _compare_restored(self, call: VectorCall) -> Iterator[bool]:
        """Raise CollectiveMismatch on all ranks if owners of one shard have loaded states that differ."""
        owner = f"{self._shard_number} {self.restored}"
        self._channel.mine[0] = fingerprint(owner) % _EXACT
        yield from self._channel.swap(call, call.traffic)
        marks = self._channel.everyones[:, 0]
        places = self._places
        for place in set(places):
            ranks = [rank for rank, one in enumerate(places) if one == place]
            other = next((rank for rank in ranks if marks[rank] != marks[ranks[0]]), None)
            if other is not None:
                raise CollectiveMismatch(
                    f"ranks {ranks[0]} and {other}, which own one shard, have loaded states with different scales: "
                    "load on each rank the state that it saved, of one step, or one that mpicomp.redistribute made"
                )
        self.restored = ""

    def _exchange(self, call: VectorCall, finite: bool | None) -> Generator[bool, None, int]:
        """Make the method's step of this rank's shard; returns its outcome."""
        local = self._local
        if finite is False:
            # The method's own check then finds it, on the owners of all shards alike: they fail, or skip, together.
            local.spoil()
        if finite is None:
            inner = ShardCall(call, self._text, None, local.result, local.read)
        else:
            inner = ShardCall(call, self._text, local.sums, local.result)
        try:
            yield from self._inner.steps(inner)
        except NonFiniteGradient:
            return BAD
        local.packed = inner.packed
        return FINE if finite is not False or self._skips else BAD

    def _mean_of_node(self, call: VectorCall, finite: bool | None) -> Generator[bool, None, int]:
        local = self._local
        self._adds_pending = self.has_pending and (finite or not self._skips)
        if not finite and self._skips:
            local.clear()
            self._feedback.skipped += 1
            return FINE
        sums = self._pending.added_to(local.sums) if self._adds_pending else local.sums
        kept = yield from local.keep(call, sums)
        return FINE if finite and kept else BAD

    def _raise(self, call: VectorCall) -> Iterator[bool]:
        """Raise the error that names the ranks with NaN or infinity; all ranks of all nodes come here."""
        self._channel.mine[0] = not (yield from self._local.all_finite(call, call.values))
        yield from self._channel.swap(call, call.traffic)
        raise call.non_finite(bad_ranks(self._channel.everyones[:, 0] != 0))


class LocalMeanDriver(Driver):
    """Driver of exact means over the ranks of a node, as parts of calls of all nodes.

    Parameters
    ----------
    local : Communicator
        Ranks of this rank's node.
    spec : VectorSpec
    method : object
        For messages.
    mean : HostMean
        See `mpicomp.reducers.full_precision_mean.mean_in`.
    """

    def __init__(self, local: Communicator, spec: VectorSpec, method: object, mean: Any) -> None:
        self._mean = mean
        self._text = CallText(local, method, spec, local.fixed_tag(), "mean within a node")

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        inner = ShardCall(call, self._text, call.values, call.out)
        yield from self._mean.steps(inner, call.values, call.out)


def _placed(here: str, describe: Callable[[], str]) -> str:
    text = describe()
    return text if text.startswith(here) else f"{here}: {text}"


def _span(call: VectorCall, kind: str, name: str) -> AbstractContextManager[None]:
    """Record a phase, unless phases of other calls may overlap it."""
    observer = call.group.observer
    return nullcontext() if observer is None or call.background else observer.span(kind, name)
