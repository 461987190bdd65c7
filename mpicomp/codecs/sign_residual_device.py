"""Marsit's feedback on a device: the vector is encoded where it lies, and only its signs cross to the host.

The same kernels by name, so the same bits. Signs go to the host piece by piece, where they travel and are merged, and
merged signs come back. What the ranks tell each other, sums of magnitudes and clipped elements, crosses with the signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.devices import Device, Landed, wait
from collectives.testable import Testable
from mpicomp import kernels
from mpicomp.codecs.sign_residual import SAMPLE, SignResidual, SignRule, Source, Tensors


class DeviceSignResidual(SignResidual):
    """Residual and running magnitudes of one vector on a device; float32 or float64. Parameters as in `SignResidual`.

    Attributes
    ----------
    residual : tensor[n] or None
        On the device.
    """

    def __init__(
        self,
        rule: SignRule,
        n: int,
        dtype: str,
        ranks: int,
        lengths: NDArray[np.int64],
        padded: NDArray[np.int64],
        device: Device,
    ) -> None:
        self._device = device
        super().__init__(rule, n, dtype, ranks, lengths, padded, "cuda")
        self._zero_sums, self._stateless = self._stateless, False  # one kernel packs all, and sums too
        self._spans: list[slice] = []
        self._words_of: list[slice] = []
        self._total: NDArray[Any] | None = None  # of full-precision rounds, on the host

    def _zeros(self, n: int, dtype: np.dtype[Any]) -> Any:  # type: ignore[override]
        return self._device.zeros(n, dtype.name)

    def lay_out(
        self, pieces: Sequence[range], bits: NDArray[np.uint64], second: NDArray[np.uint64] | None = None
    ) -> None:
        """See `SignResidual`; the bits are the host's."""
        self._device_bits = self._device.zeros(bits.size, "int64")
        self._integers = self._device.zeros(0, f"int{8 * self._compute.itemsize}").dtype
        super().lay_out(pieces, self._device_bits, second)
        self._host_bits = bits
        self._words_of = [slice(cut.start // 64, -(-cut.stop // 64)) for cut in pieces]
        counts = np.cumsum([0, *(sum(len(part.sums) for part in parts) for parts in self._parts)]).tolist()
        self._spans = [slice(start, stop) for start, stop in pairwise(counts)]
        self._clipped = self._device.zeros(len(pieces), "int64")
        self._pinned_bits = self._device.pinned(bits.nbytes).view(np.int64)
        self._host_sums = self._device.pinned(8 * len(self._sums)).view(np.float64)
        self._host_clipped = self._device.pinned(8 * len(pieces)).view(np.int64)

    # One step --------------------------------------------------------------------------------------------------------

    def begin(self, step: int, source: Source, out: Any, tensors: Tensors | None = None) -> None:
        """See `SignResidual`; `out` is on the device."""
        super().begin(step, source, out, None)

    def _take_out(self, out: Any) -> None:
        self._out = out.view(self._integers)

    def _forget_clipped(self) -> None:
        self._device.run(self._clipped.zero_)
        self._host_clipped[:] = 0

    def encode(self, piece: int) -> Testable | None:
        """See `SignResidual`: tells when the signs are on the host."""
        device, words, sums, one = self._device, self._words_of[piece], self._spans[piece], slice(piece, piece + 1)
        self._encoding = True
        device.run(partial(self._encode, piece))
        if self._zero_sums:
            device.run(partial(self._sums[sums].mul_, 0.0))  # NaN where a value is not finite
        device.copy(self._sums[sums], self._host_sums[sums])
        device.copy(self._clipped[one], self._host_clipped[one])
        copy = device.copy(self._device_bits[words], self._pinned_bits[words])
        return Landed(copy, partial(self._land, words))

    def _land(self, words: slice) -> None:
        self._host_bits[words] = self._pinned_bits[words].view(np.uint64)

    def finish(self, piece: int) -> Testable | None:
        """See `SignResidual`: tells when the result is there."""
        device, words = self._device, self._words_of[piece]
        self._pinned_bits[words] = self._host_bits[words].view(np.int64)
        device.copy(self._pinned_bits[words], self._device_bits[words])
        device.run(partial(self._finish, piece))
        return device.done()

    def measure(self) -> Testable | None:
        """See `SignResidual`."""
        self._device.run(super().measure)
        return self._device.copy(self._sums, self._host_sums)

    def add_and_clear(self, total: Any) -> Testable | None:
        """See `SignResidual`; `total` is the host's."""
        on_device = self._out.view(self._source.values.dtype)  # type: ignore[union-attr]
        self._device.run(partial(super().add_and_clear, on_device))
        self._device.copy(self._sums, self._host_sums)
        return self._device.copy(on_device, total)

    @property
    def host_total(self) -> NDArray[Any]:
        """See `SignResidual`: memory of the host."""
        if self._total is None:
            self._total = self._device.pinned(self._n * self._compute.itemsize).view(self._compute)
        return self._total

    def deliver(self, total: NDArray[Any]) -> Testable:
        """See `SignResidual`."""
        return self._device.copy(total, self._out)

    def all_finite(self, values: Any) -> bool:
        """See `SignResidual`; waits for the device."""
        flag, host = self._device.zeros(1, "uint8"), self._device.pinned(1)
        self._device.run(lambda: flag.copy_(self._kernels.all_finite(values)))
        wait(self._device.copy(flag, host))
        return bool(host[0])

    def clear(self, out: Any) -> Testable:  # type: ignore[override]
        """See `SignResidual`."""
        self._device.run(out.zero_)
        return self._device.done()

    def report(self, row: NDArray[np.float64]) -> None:
        """See `SignResidual`."""
        add_up = kernels.of("cpu").sign.add_up
        if not add_up(self._host_sums, self._firsts, int(self._host_clipped.sum()), row):
            row[:] = np.inf if self.all_finite(self._vector()) else np.nan

    def swing(self) -> float:
        """See `SignResidual`."""
        assert self.residual is not None
        sample = self._to_host(self.residual[: min(SAMPLE, int(self._lengths[0]))])
        kernels.of("cpu").sign.subtract_result(sample, self._host_bits, self._pending[0])
        return float(np.abs(sample).mean() / self._pending[0]) if self._pending[0] else 0.0

    # State -----------------------------------------------------------------------------------------------------------

    def _settled(self) -> Any:
        """A copy on the device."""
        if self.residual is None:
            return None
        settled = self._device.zeros(self._n, self._compute.name)
        self._device.run(partial(settled.copy_, self.residual))
        self._device.run(partial(self._settle, settled))
        return settled

    def settled_residual(self) -> NDArray[Any] | None:
        """The residual with nothing pending; a copy on the host."""
        settled = self._settled()
        return None if settled is None else self._to_host(settled)

    def like(self) -> dict[str, NDArray[Any]]:
        """See `Feedback`."""
        found = super().like()
        if self.residual is not None:
            found["residual"] = np.broadcast_to(np.zeros((), self._compute), (self._n,))
        return found

    def _overwrite_residual(self, values: Any) -> None:
        if isinstance(values, np.ndarray):
            pinned = self._device.pinned(values.nbytes).view(self._compute)
            pinned[:] = values
            wait(self._device.copy(pinned, self.residual))
        else:
            self._device.run(partial(self.residual.copy_, values))  # type: ignore[union-attr]

    def _to_host(self, vector: Any) -> NDArray[Any]:
        host = self._device.pinned(len(vector) * self._compute.itemsize).view(self._compute)
        wait(self._device.copy(vector, host))
        return host.copy()
