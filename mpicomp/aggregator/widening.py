"""Conversion of 16-bit vectors to float32, in which methods compute."""

from __future__ import annotations

from functools import partial

import numpy as np

from collectives.annotations import Array
from collectives.arrays import Device
from collectives.arrays.elements import widen
from mpicomp import kernels
from mpicomp.aggregator.spec import VectorSpec


class Widening:
    """Reusable float32 copy of 16-bit vectors, on the device that encodes them.

    Parameters
    ----------
    spec : VectorSpec
        Description of 16-bit vectors.
    device : Device or None
        None: the host.
    """

    def __init__(self, spec: VectorSpec, device: Device | None) -> None:
        self._dtype, self._device = spec.dtype, device
        self._wide: Array
        if device is None:
            self._wide = np.empty(spec.n, np.float32)
        else:
            self._wide, self._codes = device.zeros(spec.n, "float32"), device.zeros(0, "int16").dtype

    def of(self, vector: Array) -> Array:
        """Return the float32[n] copy of a vector: uint16 for bfloat16 on the host, a tensor of its type on a device."""
        if self._device is None:
            widen(vector, self._dtype, self._wide)
        else:
            codes, bfloat16 = vector.view(self._codes), self._dtype == "bfloat16"
            self._device.run(partial(kernels.of("cuda").sixteen_bits.widen, codes, bfloat16, self._wide))
        return self._wide
