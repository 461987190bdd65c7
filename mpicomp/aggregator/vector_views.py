"""Vectors and results of an aggregator's calls: checked, and seen as flat arrays on its device."""

from __future__ import annotations

import math

import numpy as np

from collectives.annotations import Array
from collectives.arrays import Device
from collectives.arrays.vectors import Flat, as_behaved, empty_like, flat, is_read_only, on_device
from mpicomp.aggregator.difference import Difference
from mpicomp.aggregator.spec import VectorSpec


class VectorViews:
    """Checks of one aggregator's vectors and results, and their views.

    Parameters
    ----------
    spec : VectorSpec
    device : Device or None
        Encodes the vectors; None: the host does.
    """

    def __init__(self, spec: VectorSpec, device: Device | None) -> None:
        self._spec, self._device, self._shape = spec, device, (spec.n,)
        # of arrays that need no view; none where a device encodes, and in bfloat16, as uint16 may be anything
        self._plain = spec.stored if device is None and spec.dtype != "bfloat16" else None
        self._fixed: tuple[Array, Array] = None, None  # arrays of `fix`
        self._fixed_views: tuple[Flat, Flat, Array] | None = None

    def fix(self, vector: Array, out: Array) -> None:
        """View arrays on the aggregator's device once, for a caller who keeps them and passes both to every call."""
        self._fixed, self._fixed_views = (vector, out), None

    def are_plain(self, vector: Array, out: Array) -> bool:
        """Return True for two NumPy arrays that need no view: the common case, in a tenth of the time."""
        if type(vector) is not np.ndarray or type(out) is not np.ndarray:
            return False
        dtype, shape, flags = self._plain, self._shape, out.flags
        return (
            vector.dtype is dtype
            and out.dtype is dtype
            and vector.shape == shape
            and out.shape == shape
            and vector.flags.carray
            and flags.c_contiguous
            and flags.writeable
            and not np.may_share_memory(vector, out)
        )

    def of(self, vector: Array | Difference, out: Array | None) -> tuple[Flat, Flat, Array]:
        """Return the checked vector and result as flat arrays, and the result as the caller gets it."""
        if isinstance(vector, Difference) and self._device is not None:
            raise TypeError(f"a Difference is not encoded on {self._device.name}: pass a tensor there")
        device = self._device
        is_fixed = device is not None and vector is self._fixed[0] and out is self._fixed[1]
        if is_fixed and device is not None and self._fixed_views is not None:
            device.follow()
            return self._fixed_views
        source = self.view(vector.vector if isinstance(vector, Difference) else vector)
        result = empty_like(vector) if out is None else out
        target = self.view(result)
        if is_read_only(target, result):
            raise ValueError("out is read-only: pass an array that can be written")
        if source.overlaps(target):
            raise ValueError("out shares memory with the vector: pass another array")
        if device is None:  # Numba would compile other forms of its kernels within the call
            source = source._replace(values=as_behaved(source.values))
        if is_fixed:
            self._fixed_views = source, target, result
        return source, target, result

    def view(self, array: Array) -> Flat:
        """Return a vector or result as a flat array on the aggregator's device."""
        spec, vector = self._spec, flat(array) if self._device is None else on_device(self._device, array)
        if vector.dtype != spec.dtype:
            raise TypeError(
                f"the vector has type {vector.dtype}, the aggregator was started for {spec.dtype}: convert the vector, "
                f'or start another by dtype="{vector.dtype}"'
            )
        if (n := math.prod(vector.shape)) != spec.n:
            raise ValueError(
                f"the vector has {n} elements, the aggregator was started for {spec.n}: start another for {n}, once, "
                "and keep it"
            )
        return vector
