"""Exact mean of the ranks' vectors, and an error that names the ranks with NaN or infinity."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from collectives import Communicator, NonFiniteGradient
from collectives.annotations import Array, FloatArray, override
from collectives.arrays import Device, named
from collectives.arrays.elements import SIXTEEN_BIT
from collectives.arrays.vectors import Flat, held
from collectives.execution.handle import Steps
from collectives.progress.polling import done
from mpicomp import kernels
from mpicomp.aggregator import nonfinite
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Reducer
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.feedback.base import FiniteFlag, bad_ranks, compute_type, words_of


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
        self.skipped = False
        # check a widened copy now, since the sums overwrite it
        widened_bad = None if call.wide is None else not nonfinite.all_finite(call.wide)
        yield from call.group.dense_steps(call, call.values, call.spec.dtype, True, call.out, call.traffic)
        # the result is equal on all ranks, so all of them enter the exchange that finds the ranks with bad inputs
        if not nonfinite.all_finite_result(call.out, call.spec.dtype):
            yield from self.reject(call, not nonfinite.all_finite(call.values) if widened_bad is None else widened_bad)
            call.out[:] = 0

    def array_steps(self, call: VectorCall, source: Flat, target: Flat) -> Iterator[bool]:
        """Write the mean of vectors on one device to a result there, without a copy; see `steps`."""
        yield from call.group.mean_of_arrays(call, source, target, call.traffic)
        if not (yield from _all_finite(call, target)):
            yield from self.reject(call, not (yield from _all_finite(call, source)))

    def reject(self, call: VectorCall, bad: bool) -> Iterator[bool]:
        """Raise the error that names all ranks whose vector is `bad`, on all ranks alike.

        Where it returns instead, the caller overwrites the result with zeros.
        """
        self._flag.mine[0] = bad
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
    feedback : object
        Object whose attribute `skipped` counts such steps.
    """

    def __init__(self, comm: Communicator, feedback: Any) -> None:
        super().__init__(comm)
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


class DeviceMean:
    """Mean over ranks of vectors on a device, which are summed there or through the host, as by `allreduce`.

    Memory of the host for the second way is allocated here: an allocation may fail in the middle of a step.

    Parameters
    ----------
    device : Device
    n : int
    dtype : str
        Type of the mean. Of 16-bit vectors the float32 copies are added.
    """

    def __init__(self, device: Device, n: int, dtype: str) -> None:
        self._device, self._dtype, self._narrow = device, dtype, dtype in SIXTEEN_BIT
        self._outward = self._back = device.pinned(n * compute_type(dtype)().itemsize)
        if self._narrow:
            self._back = device.pinned(2 * n)
        self._finite = FiniteFlag(device)

    def steps(self, call: VectorCall, values: Array, out: Array, scratch: Sequence[FloatArray] | None = None) -> Steps:
        """Write the mean to `out`, which may be `values`. Float32 copies of 16-bit vectors are overwritten.

        scratch : as in `Communicator.dense_steps`.
        """
        source = held(self._device, values, self._dtype, self._outward)
        target = held(self._device, out, self._dtype, self._back)
        return call.group.mean_of_arrays(call, source, target, call.traffic, scratch)

    def all_finite(self, call: VectorCall, vector: Array) -> Generator[bool, None, bool]:
        """Return True if a vector, or a result of 16 bits, holds neither NaN nor infinity."""
        finite, sign = self._finite, kernels.of("cuda").sign
        finite.reset()

        def find_nonfinite() -> None:
            if vector.element_size() == 2:
                exponent = nonfinite.EXPONENT[self._dtype]
                finite.check(sign.all_finite_16, words_of(self._device, vector), exponent)
            else:
                finite.check(sign.all_finite, vector)

        self._device.run(find_nonfinite)
        yield from done(call, finite.fetch())
        return bool(finite)


class StagedMean(Reducer):
    """Exact mean of vectors on a device.

    Parameters
    ----------
    mean : FullPrecisionMean
        Reducer of vectors in the host's memory.
    spec : VectorSpec
    device : Device
    """

    def __init__(self, mean: FullPrecisionMean, spec: VectorSpec, device: Device) -> None:
        self._mean, self._device = mean, device
        self._device_mean = DeviceMean(device, spec.n, spec.dtype)

    @property
    def skipped(self) -> bool:
        """True if the result of the last step is zeros instead of a mean."""
        return self._mean.skipped

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        all_finite, values = self._device_mean.all_finite, call.values
        self._mean.skipped = False
        # check a widened copy now, since the sums overwrite it
        bad = None if call.wide is None else not (yield from all_finite(call, call.wide))
        yield from self._device_mean.steps(call, values, call.out)
        if not (yield from all_finite(call, call.out)):
            if bad is None:
                bad = not (yield from all_finite(call, values))
            yield from self._mean.reject(call, bad)
            self._device.run(call.out.zero_)  # type: ignore[attr-defined]
            yield from done(call, self._device.done())


def staged(mean: FullPrecisionMean, spec: VectorSpec, used: bool = True) -> FullPrecisionMean | StagedMean:
    """Return the mean for the vectors' device; memory is pinned only if it is `used`."""
    return mean if spec.device == "cpu" or not used else StagedMean(mean, spec, named(spec.device))
