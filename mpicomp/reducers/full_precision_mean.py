"""Exact mean of the ranks' vectors, and an error that names the ranks with NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from collectives import Communicator, NonFiniteGradient
from collectives.annotations import Array, FloatArray, override
from collectives.arrays.elements import NARROW
from collectives.arrays.vectors import Flat, held
from collectives.dense.allreduce import PIECE_BYTES
from collectives.execution.call import Steps
from collectives.execution.staged import until_queued
from collectives.progress.polling import done
from mpicomp.aggregator.algorithm import MessageModel
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Reducer, Round
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.feedback import nonfinite
from mpicomp.feedback.base import bad_ranks, compute_type
from mpicomp.spaces import DeviceSpace, Space, space_at


class HostMean:
    """Mean over ranks of vectors in the host's memory.

    Parameters
    ----------
    dtype : str
        Type of the mean. Of 16-bit vectors the float32 copies are added.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def steps(self, call: VectorCall, values: Array, out: Array, scratch: Sequence[FloatArray] | None = None) -> Steps:
        """Write the mean to `out`, which may be `values`. Float32 copies of 16-bit vectors are overwritten.

        scratch : as in `Communicator.dense_steps`.
        """
        return call.group.dense_steps(call, values, self._dtype, True, out, call.traffic, scratch)

    def all_finite(self, call: VectorCall, vector: Array) -> Generator[bool, None, bool]:
        """Return True if a vector, or a result of 16 bits, holds neither NaN nor infinity."""
        yield from ()
        narrow = vector.itemsize == 2
        return nonfinite.all_finite_result(vector, self._dtype) if narrow else nonfinite.all_finite(vector)


class DeviceMean(HostMean):
    """Mean over ranks of vectors on a device, which are summed there or through the host, as by `allreduce`.

    Memory of the host for the second way is allocated here: an allocation may fail in the middle of a step.

    Parameters
    ----------
    space : DeviceSpace
    n : int
    dtype : str
        As in `HostMean`.
    """

    def __init__(self, space: DeviceSpace, n: int, dtype: str) -> None:
        super().__init__(dtype)
        self._space, pinned = space, space.device.pinned
        self._outward = self._back = pinned(n * compute_type(dtype)().itemsize)
        if dtype in NARROW:
            self._back = pinned(2 * n)
        self._finite = space.flag()

    @override
    def steps(self, call: VectorCall, values: Array, out: Array, scratch: Sequence[FloatArray] | None = None) -> Steps:
        source = held(self._space.device, values, self._dtype, self._outward)
        target = held(self._space.device, out, self._dtype, self._back)
        return call.group.sum_arrays(call, source, target, "mean", call.traffic, scratch=scratch)

    @override
    def all_finite(self, call: VectorCall, vector: Array) -> Generator[bool, None, bool]:
        finite, sign = self._finite, self._space.kernels.sign
        finite.reset()

        def find_nonfinite() -> None:
            if vector.element_size() == 2:
                exponent = nonfinite.EXPONENT[self._dtype]
                finite.check(sign.all_finite_16, self._space.words(vector), exponent)
            else:
                finite.check(sign.all_finite, vector)

        self._space.launch(find_nonfinite)
        yield from done(call, finite.fetch())
        return bool(finite)


def mean_in(space: Space, n: int, dtype: str) -> HostMean:
    """Return the mean of vectors where they are encoded."""
    return DeviceMean(space, n, dtype) if isinstance(space, DeviceSpace) else HostMean(dtype)


class FullPrecisionMean(Reducer):
    """Reducer of the exact mean: vectors travel as they are.

    Attributes
    ----------
    mean : HostMean
    skipped : bool
        The result of the last step is zeros instead of a mean.
    """

    skipped = False

    def __init__(self, comm: Communicator, spec: VectorSpec) -> None:
        self._flag, self._space = SideChannel(comm, 1), space_at(spec.device)
        self.mean = mean_in(self._space, spec.n, spec.dtype)

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        mean, self.skipped = self.mean, False
        # check a widened copy now, since the sums overwrite it
        widened_bad = None if call.wide is None else not (yield from mean.all_finite(call, call.wide))
        yield from mean.steps(call, call.values, call.out)
        # the result is equal on all ranks, so all of them enter the exchange that finds the ranks with bad inputs
        if not (yield from mean.all_finite(call, call.out)):
            yield from self.reject(
                call, not (yield from mean.all_finite(call, call.values)) if widened_bad is None else widened_bad
            )
            self._space.launch(_clear, call.out)
            yield from until_queued(call, self._space.done())

    def array_steps(self, call: VectorCall, source: Flat, target: Flat) -> Iterator[bool]:
        """Write the mean of vectors on one device to a result there, without a copy; see `run`."""
        yield from call.group.sum_arrays(call, source, target, "mean", call.traffic)
        if not (yield from _all_finite(call, target)):
            yield from self.reject(call, not (yield from _all_finite(call, source)))

    def reject(self, call: VectorCall, bad: bool) -> Iterator[bool]:
        """Raise the error that names all ranks whose vector is `bad`, on all ranks alike.

        Where it returns instead, the caller overwrites the result with zeros.
        """
        self._flag.mine[0] = bad
        yield from self._flag.swap(call, call.traffic)
        raise call.non_finite(bad_ranks(self._flag.everyones[:, 0] != 0))


def _clear(out: Array) -> None:
    out[:] = 0


def _all_finite(call: VectorCall, array: Flat) -> Generator[bool, None, bool]:
    """Return True if an array on a device holds neither NaN nor infinity."""
    assert array.staging is not None
    device, vector = array.staging.device, array.staging.vector
    found, landed = device.zeros(1, "uint8"), device.pinned(1)

    def find_nonfinite() -> None:
        least, most = vector.aminmax()  # NaN, if there is one; takes no memory of the vector's length
        found.copy_(least.isfinite() & most.isfinite())

    device.run(find_nonfinite)
    yield from done(call, device.copy(found, landed))
    return bool(landed[0])


class SkippingMean(FullPrecisionMean):
    """Exact mean, or zeros if a rank has NaN or infinity.

    Parameters
    ----------
    comm : Communicator
    spec : VectorSpec
    feedback : object
        Its attribute `skipped` counts such steps.
    """

    def __init__(self, comm: Communicator, spec: VectorSpec, feedback: Any) -> None:
        super().__init__(comm, spec)
        self._feedback = feedback

    @override
    def reject(self, call: VectorCall, bad: bool) -> Iterator[bool]:
        try:
            yield from super().reject(call, bad)
        except NonFiniteGradient as error:
            if not error.ranks:  # finite numbers overflowed
                raise
            self.skipped = True
            self._feedback.skipped += 1


def summed_model(dtype: str, ranks: int) -> MessageModel:
    """Return the model of the messages of dense sums; 16-bit vectors travel as float32 until a sum is complete."""
    summing = 8 if dtype == "float64" else 4
    complete = 2 if dtype in NARROW else summing
    return MessageModel(
        lambda elements, weight: elements * (complete if weight == ranks else summing), PIECE_BYTES // summing
    )
