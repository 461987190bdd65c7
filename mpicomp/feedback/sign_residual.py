"""Marsit's feedback: the residual, the global step, and the votes that come of them.

One pass over memory adds the residual, takes signs, packs them, leaves the new residual and sums magnitudes; another
unpacks merged signs into the result. With rule "paper" the subtraction of a result waits until the next encoding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from collectives.memory import narrow, widen
from collectives.testable import Testable
from mpicomp import kernels
from mpicomp.codecs.sign import UNSIGNED
from mpicomp.feedback.scale_groups import ScaleGroups, why
from mpicomp.feedback.sign_parts import SignPart, Source, Tensors, sign_parts
from mpicomp.feedback.sign_rule import SignRule

AVERAGE = 0.9  # of the magnitudes' running mean
STREAMING_ELEMENTS = 4 << 20  # results this long are written past the caches
SAMPLE = 1 << 16


class SignResidual:
    """Residual and running magnitudes of one vector.

    Parameters
    ----------
    rule : SignRule
    n, dtype, ranks : int, str, int
        Elements, their type, and the number of ranks.
    lengths, padded : int64[tensors]
        Elements of each tensor, and the elements that it takes up.
    device : str

    Attributes
    ----------
    residual : ndarray[n] or None
        With rule "paper" the last result may still be to be subtracted: `state` gives the settled one.
    gamma : float
    skipped : int
        Steps skipped because a rank had NaN or infinity.
    clipped_fraction : float
        Of the residual's elements over all ranks, at the last step.
    packed : bool
        The step's result is left in the bits, and `out` is left alone.
    seen_finite : bool
        Whether the vector that `look` was given is finite.
    """

    state_kinds: ClassVar[dict[str, Any]] = {"gamma": "shared", "magnitudes": "shared", "residual": "mean"}
    state_nan: ClassVar[str] = "magnitudes"  # of tensors not seen yet
    seen_finite = True

    def __init__(
        self,
        rule: SignRule,
        n: int,
        dtype: str,
        ranks: int,
        lengths: NDArray[np.int64],
        padded: NDArray[np.int64],
        device: str = "cpu",
    ) -> None:
        self.rule, self._n, self._dtype, self._lengths, self._padded = rule, n, dtype, lengths, padded
        self._kernels = kernels.of(device).sign
        self._unpack_pair = kernels.of(device).shared_selection.unpack_pair
        self._compute: np.dtype[Any] = np.dtype(np.float64 if dtype == "float64" else np.float32)
        self._stored: np.dtype[Any] = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        self._narrow = self._stored.itemsize == 2
        kind, count = self._compute.type, lengths.size
        self._constants = kind(0), np.nextafter(kind(0), kind(1))
        self.residual = None if rule.residual is None else self._zeros(n, self._compute)
        self._before: tuple[Any, NDArray[np.float64], float] | None = None
        self._lazy = rule.residual == "paper"
        self._stateless = rule.residual is None and rule.global_step != "auto"
        self.gamma = rule.first_gamma
        self.skipped, self.clipped_fraction = 0, 0.0
        self._magnitudes = np.full(count, np.nan)  # a of each tensor; NaN: not seen yet
        self._pending = np.zeros(count, self._compute)  # s of the result not yet subtracted ("paper")
        self._steps, self._minus_steps, self._limits = (np.zeros(count, self._compute) for _ in range(3))
        if rule.global_step != "auto" and not self._scale(np.full(count, float(rule.global_step)), 1.0):
            raise ValueError(f"global_step={rule.global_step} is beyond what {self._compute} holds")
        self._words = UNSIGNED[self._stored.itemsize]
        if self._narrow:
            self._positive, self._negative = np.zeros(count, self._words), np.zeros(count, self._words)
        else:
            self._positive, self._negative = self._steps.view(self._words), self._minus_steps.view(self._words)
        self._elements = max(1, int(lengths.sum()) * ranks)
        self._counts = np.maximum(1.0, lengths * ranks)
        self._clipped: Any = [0]  # of each piece
        self._host_clipped: Any = self._clipped
        self._parts: list[list[SignPart]] = []
        self._host_bits, self._pairs = np.empty(0, np.uint64), False
        self._sums: Any = np.zeros(0)
        self._host_sums: NDArray[np.float64] = self._sums
        self._firsts, self._nothing = np.zeros(0, np.int64), np.empty(0, self._compute)
        self._source: Source | None = None
        self._tensors: Tensors | None = None
        self._out: NDArray[Any] = self._nothing
        self.packed = self.spoiled = False
        self._odd_positive = self._streaming = self._encoding = False

    @staticmethod
    def _zeros(n: int, dtype: Any) -> Any:
        """Memory for what kernels work on."""
        return np.zeros(n, dtype)

    def lay_out(
        self, pieces: Sequence[range], bits: NDArray[np.uint64], second: NDArray[np.uint64] | None = None
    ) -> None:
        """Use a reducer's pieces, its bits, and a second vote on each element where there is one."""
        groups = ScaleGroups.of(self._padded.tolist(), self._n)
        self._host_bits, self._pairs, self._firsts = bits, second is not None, groups.firsts
        self._sums = self._host_sums = self._zeros(groups.blocks, np.float64)  # of |u|, block by block
        self._parts = sign_parts(groups, pieces, self._lengths, (bits, second), self._sums, self.residual)

    # One step --------------------------------------------------------------------------------------------------------

    def dense_memory(self, wide: Any, out: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Where a full-precision round adds up, and where it leaves the mean; `wide` and `out` as in `VectorCall`."""
        return out if wide is None else wide, out

    def deliver(self, mean: NDArray[Any]) -> Testable | None:
        """Copy the mean to the result, if it was made elsewhere."""
        return None

    @staticmethod
    def clear(out: Any) -> Testable | None:
        """Overwrite a result with zeros."""
        out[:] = 0
        return None

    def all_finite(self, values: Any) -> bool:
        """Whether a vector in the type of computing has neither NaN nor infinity."""
        return bool(self._kernels.all_finite(values))

    def look(self, values: Any) -> Testable | None:
        """Have `seen_finite` tell what `all_finite` does."""
        self.seen_finite = self.all_finite(values)
        return None

    def check_ready(self) -> None:
        """See `Feedback`."""
        if self.spoiled:
            raise RuntimeError(
                "an earlier step met NaN or infinity, or was cut off, and its residual is spoiled: restore it by "
                "load_state_dict, or start() anew"
            )

    def begin(self, step: int, source: Source, out: NDArray[Any], tensors: Tensors | None = None) -> None:
        """Go to another vector and step.

        tensors : what the vector is the difference of. Nobody asks for the vector as long as they do, and the result is
        left `packed` where that is possible.
        """
        self._source = source
        self._take_out(out)
        self._tensors = None if self.residual is None else tensors
        self.packed = self._tensors is not None and not self._pairs
        self._odd_positive = step % 2 == 0
        self._forget_clipped()
        if self._tensors is None:
            self._vector()  # before several threads ask for it
        if self.rule.transactional:
            self._before = self._settled(), self._magnitudes.copy(), self.gamma

    def _take_out(self, out: NDArray[Any]) -> None:
        self._out = out.view(self._words)
        self._streaming = self._n >= STREAMING_ELEMENTS and out.ctypes.data % 32 == 0

    def _forget_clipped(self) -> None:
        self._clipped = self._host_clipped = [0] * len(self._parts)

    def end(self) -> None:
        """Drop the references to the caller's arrays, so that these can be freed."""
        self._out, self._source, self._tensors = self._nothing, None, None
        self._before, self._encoding = None, False

    def _vector(self) -> NDArray[Any]:
        """The vector as a whole."""
        assert self._source is not None
        self._tensors = None  # whose memory it may take
        return self._source.values

    def roll_back(self) -> None:
        """The step has failed: go back to what was before it if that was kept; else the residual is spoiled."""
        if self._before is not None:
            before, self._magnitudes, self.gamma = self._before
            if before is not None:
                self._overwrite(self.residual, before)
            self._pending[:] = 0
            self.spoiled = False
        elif self._encoding:
            self.spoiled = self.residual is not None
        self.end()

    def encode(self, piece: int) -> Testable | None:
        """Write the signs of this rank's piece; see `SignFeedback`."""
        self._encode(piece)
        return None

    def _encode(self, piece: int) -> None:
        self._encoding = True
        zero, tiny = self._constants
        tensors, whole = self._tensors, None
        vector = self._vector() if tensors is None else self._nothing
        for part in self._parts[piece]:
            u, bits, sums, tensor = vector[part.elements], part.bits, part.sums, part.tensor
            if tensors is not None:
                before, after = tensors[tensor]
                whole, u = before[part.within], after[part.within]
            if self._stateless:
                sums[:] = 0.0 if self._kernels.pack(u, bits, self._odd_positive, zero, tiny) else np.nan
                continue
            step, limit = self._steps[tensor], self._limits[tensor]
            previous = self._pending[tensor] if self._lazy else None
            terms = u, whole, part.residual, bits, step, limit, previous
            self._encode_part(piece, *terms, self._odd_positive, zero, tiny, sums)

    def _encode_part(self, piece: int, *arguments: Any) -> None:
        """Call the kernel, and add how many elements were clipped to those of the piece."""
        self._clipped[piece] += self._kernels.encode(*arguments)

    def finish(self, piece: int) -> Testable | None:
        """Turn the merged signs of a piece into the result, unless they are to be kept; see `SignFeedback`."""
        if not self.packed:
            self._finish(piece)
        return None

    def _finish(self, piece: int) -> None:
        for part in self._parts[piece]:
            positive, negative = self._positive[part.tensor], self._negative[part.tensor]
            out = self._out[part.elements]
            if part.second is None:
                self._kernels.unpack(part.bits, positive, negative, self._streaming, out)
            else:
                nothing = self._words.type(0)
                self._unpack_pair(part.bits, part.second, positive, nothing, negative, self._streaming, out)

    def add_and_clear(self, total: NDArray[Any]) -> Testable | None:
        """Overwrite `total` with the vector and the residual, and clear the residual: a full-precision round."""
        self._encoding = True
        vector = self._vector()
        for part in self._every_part():
            previous = self._pending[part.tensor] if self._lazy else None
            u, sum_ = vector[part.elements], total[part.elements]
            self._kernels.add_and_clear(u, part.residual, part.bits, previous, sum_, part.sums)
        self._pending[:] = 0
        return None

    def _every_part(self) -> Iterator[SignPart]:
        return chain.from_iterable(self._parts)

    # The global step -------------------------------------------------------------------------------------------------

    @property
    def asks_magnitudes(self) -> bool:
        """Whether the very first step must know the ranks' magnitudes beforehand."""
        return self.rule.global_step == "auto" and math.isnan(self._magnitudes[0])

    def measure(self) -> Testable | None:
        """Sum the magnitudes of this rank's vector."""
        vector = self._vector()
        for part in self._every_part():
            self._kernels.add_and_clear(vector[part.elements], None, part.bits, None, None, part.sums)
        return None

    def set_steps(self) -> bool:
        """Fix s of each tensor for this step; False if one is not finite."""
        finite = True
        if self.rule.global_step == "auto":
            finite = self._scale(self._magnitudes, self.gamma)
        if self._narrow:
            narrow(self._steps, self._dtype, self._positive.view(self._stored))
            narrow(self._minus_steps, self._dtype, self._negative.view(self._stored))
            # the residual is what the result misses, so it must see s, and limits, as rounded there
            widen(self._positive.view(self._stored), self._dtype, self._steps)
            finite = self._scale(self._steps.astype(np.float64), 1.0)
        if not finite:  # the next step measures anew, or it would meet the same mean for ever
            self._magnitudes[:] = np.nan
            if self._before is not None:
                self._before[1][:] = np.nan
        return finite

    def report(self, row: NDArray[np.float64]) -> None:
        """Fill in what this rank tells the others: clipped elements, then the sum of |u| of each tensor."""
        if not self._kernels.add_up(self._host_sums, self._firsts, int(sum(self._host_clipped)), row):
            row[:] = why(self.all_finite(self._vector()))

    def follow(self, reports: NDArray[np.float64]) -> bool:
        """Take in the ranks' reports, in rank order; False if one is not finite."""
        clipped = self._kernels.follow(reports, self._counts, AVERAGE, self._magnitudes)
        if math.isnan(clipped):
            return False
        self.clipped_fraction = clipped / self._elements
        return True

    def adapt(self) -> None:
        """Have the result subtracted later (rule "paper"); let an automatic gamma follow the fraction clipped."""
        if self._lazy:
            self._pending[:] = self._steps
        self.gamma = self.rule.next_gamma(self.gamma, self.clipped_fraction)

    def subtract_result(self, tensors: Sequence[NDArray[Any]]) -> None:
        """Subtract the last result, which was left packed, from flat tensors."""
        for part in self._every_part():
            self._kernels.subtract_result(tensors[part.tensor][part.within], part.bits, self._steps[part.tensor])

    def swing(self) -> float:
        """Mean magnitude of a sample of the residual with nothing pending, in global steps; rule "paper"."""
        assert self.residual is not None
        sample = self._to_host(self.residual[: min(SAMPLE, int(self._lengths[0]))])
        kernels.of("cpu").sign.subtract_result(sample, self._host_bits, self._pending[0])
        return float(np.abs(sample).mean() / self._pending[0]) if self._pending[0] else 0.0

    def _scale(self, magnitudes: NDArray[np.float64], gamma: float) -> bool:
        scaled = magnitudes, gamma, self.rule.clip, self._steps, self._minus_steps, self._limits
        return bool(self._kernels.set_steps(*scaled))

    # State -----------------------------------------------------------------------------------------------------------

    def settled_residual(self) -> NDArray[Any] | None:
        """The residual with nothing pending; a copy."""
        if self.residual is None:
            return None
        settled = self._to_host(self.residual)
        self._settle(settled)
        return settled

    @staticmethod
    def _to_host(vector: Any) -> NDArray[Any]:
        """A copy in the host's memory."""
        return np.array(vector)

    def _settle(self, residual: Any) -> None:
        """Subtract the last result from a copy of the residual, if that is still to be done."""
        if self._lazy:
            for part in self._every_part():
                self._kernels.subtract_result(residual[part.elements], part.bits, self._pending[part.tensor])

    def _settled(self) -> Any:
        """What a step that fails goes back to."""
        return self.settled_residual()

    @staticmethod
    def _overwrite(vector: Any, values: Any) -> None:
        vector[:] = values

    def state(self) -> dict[str, Any]:
        """Settled residual, running magnitudes and gamma; copies."""
        settled = self.settled_residual()
        residual = {} if settled is None else {"residual": settled}
        return {"gamma": self.gamma, "magnitudes": self._magnitudes.copy(), **residual}

    def like(self) -> dict[str, NDArray[Any]]:
        """See `Feedback`."""
        residual = {} if self.residual is None else {"residual": self.residual}
        return {"gamma": np.zeros(()), "magnitudes": self._magnitudes, **residual}

    def load(self, state: dict[str, NDArray[Any]]) -> str:
        """See `Feedback`."""
        if self.residual is not None:
            self._overwrite(self.residual, state["residual"])
        self._magnitudes = state["magnitudes"].copy()
        if self.rule.gamma == "auto":
            self.gamma = float(state["gamma"])
        self._pending[:] = 0
        self.spoiled = False
        digest = hashlib.blake2b(self._magnitudes.tobytes(), digest_size=8).hexdigest()
        # the ranks' steps must stay the same to the bit, so they compare what they go on with
        return f"gamma {self.gamma!r} and magnitudes {digest}"
