"""Exact mean of the ranks' vectors, and an error that names the ranks with NaN or infinity."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from collectives import Communicator, NonFiniteGradient
from collectives.annotations import FloatArray, override
from collectives.arrays import Device, named
from collectives.arrays.vectors import Flat
from collectives.progress.polling import done
from mpicomp.aggregator import nonfinite
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Reducer
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.feedback.base import bad_ranks


class FullPrecisionMean(Reducer):
    """Reducer of the exact mean.

    Attributes
    ----------
    skipped : bool
        The result of the last step is zeros instead of a mean.
    """

    skipped = False

    def __init__(self, comm: Communicator) -> None:
        self._flag = SideChannel(comm, 1)

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        # check a widened copy now, since the sums overwrite it
        widened_bad = None if call.wide is None else not nonfinite.all_finite(call.wide)
        yield from call.group.dense_steps(call, call.values, call.spec.dtype, True, call.out, call.traffic)
        # the result is equal on all ranks, so all of them enter the exchange that finds the ranks with bad inputs
        if not nonfinite.all_finite_result(call.out, call.spec.dtype):
            bad = not nonfinite.all_finite(call.values) if widened_bad is None else widened_bad
            self._flag.mine[0] = bad
            yield from self._flag.swap(call, call.traffic)
            raise call.non_finite(bad_ranks(self._flag.everyones[:, 0] != 0))

    def array_steps(self, call: VectorCall, source: Flat, target: Flat) -> Iterator[bool]:
        """Write the mean of vectors on one device to a result there, without a copy; see `steps`."""
        yield from call.group.mean_of_arrays(call, source, target, call.traffic)
        if not (yield from _all_finite(call, target)):
            self._flag.mine[0] = not (yield from _all_finite(call, source))
            yield from self._flag.swap(call, call.traffic)
            raise call.non_finite(bad_ranks(self._flag.everyones[:, 0] != 0))

    @property
    @override
    def can_undo(self) -> bool:
        return True

    @override
    def undo(self) -> None:
        return  # a mean has no state


def _all_finite(call: VectorCall, array: Flat) -> Generator[bool, None, bool]:
    """Return True if an array on a device holds neither NaN nor infinity."""
    assert array.staging is not None
    device, vector = array.staging.device, array.staging.vector
    found, landed = device.zeros(1, "uint8"), device.pinned(1)

    def look() -> None:
        least, most = vector.aminmax()  # NaN, if there is one; takes no memory of the vector's length
        found.copy_(least.isfinite() & most.isfinite())

    device.run(look)
    yield from done(call, device.copy(found, landed))
    return bool(landed[0])


class SkippingMean(FullPrecisionMean):
    """Exact mean, or zeros if a rank has NaN or infinity.

    Parameters
    ----------
    comm : Communicator
    feedback : object
        Object whose attribute `skipped` counts such steps.
    """

    def __init__(self, comm: Communicator, feedback: Any) -> None:
        super().__init__(comm)
        self._feedback = feedback

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        self.skipped = False
        try:
            yield from super().steps(call)
        except NonFiniteGradient as error:
            if not error.ranks:  # finite numbers overflowed
                raise
            self.skipped = True
            self._feedback.skipped += 1
            call.out[:] = 0


class StagedMean(Reducer):
    """Exact mean of vectors on a device, which cross to pinned memory of the host; the mean crosses back.

    Parameters
    ----------
    mean : FullPrecisionMean
        Reducer of vectors in the host's memory.
    spec : VectorSpec
    device : Device
    """

    def __init__(self, mean: FullPrecisionMean, spec: VectorSpec, device: Device) -> None:
        self._mean, self._spec, self._device = mean, spec, device
        self._values, self._result = self._memory()

    @property
    def skipped(self) -> bool:
        """True if the result of the last step is zeros instead of a mean."""
        return self._mean.skipped

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        there, values, result = call.out, self._values, self._result
        yield from done(call, self._device.copy(call.values, values))
        call.values = call.wide = values
        call.out = result
        yield from self._mean.steps(call)
        call.out = there
        yield from done(call, self._device.copy(result, there))

    def _memory(self) -> tuple[FloatArray, FloatArray]:
        spec, pinned = self._spec, self._device.pinned
        values = pinned(spec.n * spec.compute.itemsize).view(spec.compute)
        return values, pinned(spec.n * spec.stored.itemsize).view(spec.stored) if spec.sixteen_bit else values


def staged(mean: FullPrecisionMean, spec: VectorSpec, used: bool = True) -> FullPrecisionMean | StagedMean:
    """Return the mean for the vectors' device; memory is pinned only if it is `used`."""
    return mean if spec.device == "cpu" or not used else StagedMean(mean, spec, named(spec.device))
