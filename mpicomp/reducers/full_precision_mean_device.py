"""The exact mean of vectors on a device: they cross to the host, and it crosses back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from collectives import Communicator
from collectives.devices import Device, named
from collectives.progress.polling import done
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.reducers.full_precision_mean import FullPrecisionMean


class DeviceFullPrecisionMean(FullPrecisionMean):
    """One vector's; see `Reducer`. Takes pinned memory of the host from its first step on.

    Parameters
    ----------
    comm : Communicator
    spec : VectorSpec
    device : Device
    """

    def __init__(self, comm: Communicator, spec: VectorSpec, device: Device) -> None:
        super().__init__(comm)
        self._device, self._spec = device, spec
        self._host: tuple[NDArray[Any], NDArray[Any]] | None = None  # of values, and of the result

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """See `Reducer`."""
        if self._host is None:
            self._host = self._memory()
        there, (values, mean) = call.out, self._host
        yield from done(call, self._device.copy(call.values, values))
        call.values = call.wide = values
        call.out = mean
        yield from super().steps(call)
        call.out = there
        yield from done(call, self._device.copy(mean, there))

    def _memory(self) -> tuple[NDArray[Any], NDArray[Any]]:
        spec, pinned = self._spec, self._device.pinned
        values = pinned(spec.n * spec.compute.itemsize).view(spec.compute)
        return values, pinned(spec.n * spec.stored.itemsize).view(spec.stored) if spec.sixteen_bit else values


def full_precision_mean(comm: Communicator, spec: VectorSpec) -> FullPrecisionMean:
    """Of vectors wherever they are."""
    if spec.device == "cpu":
        return FullPrecisionMean(comm)
    return DeviceFullPrecisionMean(comm, spec, named(spec.device))
