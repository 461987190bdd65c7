"""The exact mean of vectors on a device: they cross to the host, and it crosses back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from collectives.devices import Device, named
from collectives.progress.polling import done
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Reducer
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.reducers.full_precision_mean import FullPrecisionMean


class StagedMean(Reducer):
    """One vector's; see `Reducer`. Takes pinned memory of the host.

    Parameters
    ----------
    mean : FullPrecisionMean
        Of what has crossed.
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

    def _memory(self) -> tuple[NDArray[Any], NDArray[Any]]:
        spec, pinned = self._spec, self._device.pinned
        values = pinned(spec.n * spec.compute.itemsize).view(spec.compute)
        return values, pinned(spec.n * spec.stored.itemsize).view(spec.stored) if spec.sixteen_bit else values


def staged(mean: FullPrecisionMean, spec: VectorSpec, used: bool = True) -> FullPrecisionMean | StagedMean:
    """The same mean, of vectors wherever they are; on the host's alone where it is not `used`."""
    return mean if spec.device == "cpu" or not used else StagedMean(mean, spec, named(spec.device))
