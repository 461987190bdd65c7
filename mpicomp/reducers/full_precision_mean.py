"""The exact mean, and who is to blame where it is not finite."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from collectives import Communicator, NonFiniteGradient
from collectives.annotations import FloatArray
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
    """One vector's; see `Reducer`.

    Attributes
    ----------
    skipped : bool
        The last step gave zeros instead of a mean.
    """

    skipped = False

    def __init__(self, comm: Communicator) -> None:
        self._flag = SideChannel(comm, 1)

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """See `Reducer`: only a result that is not finite, which is so on all ranks, makes them ask who it was."""
        # a widened copy is looked at now, as the sums will take its place
        widened_bad = None if call.wide is None else not nonfinite.all_finite(call.wide)
        yield from call.group.dense_steps(call, call.values, call.spec.dtype, True, call.out, call.traffic)
        if not nonfinite.all_finite_result(call.out, call.spec.dtype):
            bad = not nonfinite.all_finite(call.values) if widened_bad is None else widened_bad
            self._flag.mine[0] = bad
            yield from self._flag.swap(call, call.traffic)
            raise call.non_finite(bad_ranks(self._flag.everyones[:, 0] != 0))

    def array_steps(self, call: VectorCall, source: Flat, target: Flat) -> Iterator[bool]:
        """As `steps`, for a vector and a result that are on one device, where they are looked at too."""
        yield from call.group.mean_of_arrays(call, source, target, call.traffic)
        if not (yield from _all_finite(call, target)):
            self._flag.mine[0] = not (yield from _all_finite(call, source))
            yield from self._flag.swap(call, call.traffic)
            raise call.non_finite(bad_ranks(self._flag.everyones[:, 0] != 0))

    @property
    def can_undo(self) -> bool:
        """Nothing is kept, so nothing need be taken back."""
        return True

    def undo(self) -> None:
        """See `can_undo`."""


def _all_finite(call: VectorCall, array: Flat) -> Generator[bool, None, bool]:
    """Whether an array on a device holds neither NaN nor infinity."""
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
    """Zeros where a rank has NaN or infinity.

    Parameters
    ----------
    comm : Communicator
    feedback : object
        Its attribute `skipped` counts these steps.
    """

    def __init__(self, comm: Communicator, feedback: Any) -> None:
        super().__init__(comm)
        self._feedback = feedback

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """See `Reducer`."""
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
    """The exact mean of vectors on a device: they cross to pinned memory of the host, and the mean crosses back.

    Parameters
    ----------
    mean : FullPrecisionMean
        Of the vectors in the host's memory.
    spec : VectorSpec
    device : Device
    """

    def __init__(self, mean: FullPrecisionMean, spec: VectorSpec, device: Device) -> None:
        self._mean, self._spec, self._device = mean, spec, device
        self._values, self._result = self._memory()

    @property
    def skipped(self) -> bool:
        """See `FullPrecisionMean`."""
        return self._mean.skipped

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """See `Reducer`."""
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
