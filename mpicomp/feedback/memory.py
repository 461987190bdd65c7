"""The memory of methods whose ranks all send the same elements.

    v      = (m + g)[I]
    m      <- (1 - beta) m + beta (m + g), but (1 - beta) m at I     for beta = 1: m + g, but exactly 0 at I

m is the memory (the residual), g this rank's vector, I the places that are sent. With a momentum of each rank,
u <- momentum u + g takes the place of g, and with masking u becomes 0 at I.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.annotations import AnyArray, Array, Doubles, Testable, override
from mpicomp.codecs.sign import UNSIGNED
from mpicomp.codecs.top_k import Selector
from mpicomp.feedback import nonfinite
from mpicomp.feedback.base import Feedback, Problem, Residual, StepInput, bad_ranks
from mpicomp.feedback.chunk_parts import Part, join_runs
from mpicomp.feedback.rounds import Round
from mpicomp.spaces import Space
from mpicomp.spaces.mirror import ALL, Mirror

FLAG_BYTES = 16  # of a flag: kernels have forms of their own for addresses that are no multiples of 16
_GOOD, _OVERFLOWED, _BAD = range(3)  # a rank's report about its numbers


class Memory(Feedback):
    """The residual of one vector, and the values of the places that are sent.

    Parameters
    ----------
    space : Space
    n : int
    compute, stored : dtype
        float32 or float64; and the type of the result, uint16 for bfloat16.
    parts : tuple of Part
    beta : float
    dtype : str
        Type of the vectors.
    momentum : (float, bool), optional
        Momentum, and whether it is masked.

    Attributes
    ----------
    vector : ndarray[n]
        This rank's vector, or its momentum, of the step that is made.
    parts : tuple of Part
    runs : tuple of Part
        The same elements in as many pieces as kernels are best given.
    places : int64[k]
        Indices that the last sparse step sent; on the device.
    values : ndarray[k]
        Of this rank at these places; in the host's memory, as are the means.
    means : ndarray[k]
        Of the ranks, in the result's type.
    indices : uint32[k]
        In the host's memory: places within their chunks, of all parts. Where a device encodes.
    finite : FiniteFlag
        Everything that was checked since `begin` was finite; known once `encode` is done.
    """

    n_reports = 1
    reports_when = "beside"
    decodes_with_reports = True

    def __init__(
        self,
        space: Space,
        n: int,
        compute: np.dtype[Any],
        stored: np.dtype[Any],
        parts: tuple[Part, ...],
        beta: float,
        dtype: str,
        momentum: tuple[float, bool] | None = None,
    ) -> None:
        self._residual = Residual(space, n, compute)
        super().__init__(space, {"residual": self._residual})
        self._momentum, (fraction, self._masks) = None, momentum or (0.0, False)
        if momentum is not None:
            self._momentum = self.residuals["momentum"] = Residual(space, n, compute, pending=False)
        self.parts = parts
        self.runs = parts if space.is_host else join_runs(parts)
        count, kind = parts[-1].last if parts else 0, compute.type
        self.dtype, self.places = compute, space.zeros(count, "int64")
        self._summed = False
        whole = float(beta) == 1.0
        self.pending_factor = 1 / beta  # the memory holds only beta of the elements that were not sent
        self._fraction = kind(fraction)
        self._past: Any = None if whole else kind(1 - beta)
        self._gain: Any = None if whole else kind(beta)
        self._kept = None if whole else space.zeros(count, compute)
        self._result_type = dtype
        self._arrived = space.mirror(space.words(space.empty(count, f"i{stored.itemsize}")))
        self.means: AnyArray = self._arrived.here.view(UNSIGNED[stored.itemsize]).view(stored)
        self._flags: Mirror | None = None
        if space.is_host:
            self._picked = self.values = space.empty(count, compute)
            self.finite = space.flag()
        else:  # values and flag cross in one copy
            nbytes = count * compute.itemsize
            first = -(-nbytes // FLAG_BYTES) * FLAG_BYTES
            self._flags = both = space.mirror(space.zeros(first + FLAG_BYTES, "uint8"))
            self._picked = both.there[:nbytes].view(space.zeros(0, compute).dtype)
            self.values = both.here[:nbytes].view(compute)
            self.finite = space.flag((both.there[first : first + 1], both.here[first : first + 1]))
            self._indices = space.mirror(space.zeros(count, "int32"))
            self.indices = self._indices.here.view(np.uint32)
            self._selectors = {(run.chunk, run.keep): Selector(run.chunk, run.keep, compute) for run in self.runs}
        self.end()

    @override
    def rounds(self) -> tuple[Round, ...]:
        whole = Part(0, len(self._residual.current), 1, 1, 0, self.values.size)
        parts = self.parts if self.space.is_host else (whole,)
        meanwhile = ("seconds_decoding", self.clear, parts), ("seconds_encoding", self.renew, parts)
        return (Round(self.encode, self.decode, numbers=lambda: (self.values, self.means), meanwhile=meanwhile),)

    # Before values travel --------------------------------------------------------------------------------------------

    @override
    def begin(self, call: StepInput) -> None:
        """Look at another vector; `commit` counts once `renew` has made a residual."""
        self._summed = False
        self.vector = self._given = call.values
        self._out = call.out
        if self._momentum is not None:
            self.vector, old = self._momentum.following, self._momentum.current
            self.launch(self.kernels.arrays.compensate, self._given, old, self._fraction, self.vector)
        self.finite.reset()

    @override
    def end(self) -> None:
        super().end()
        self.vector = self._given = self._out = None

    def check(self, vector: Array, some: slice = ALL) -> None:
        """Clear `finite` unless vector + residual is finite in some elements."""
        finite_sum, residual = self.kernels.sparse.finite_sum, self._residual.current[some]
        self.launch(self.finite.check, finite_sum, vector[some], residual, self.sums(some))

    def check_alone(self, vector: Array) -> None:
        """Clear `finite` unless a vector is finite without the residual."""
        self.launch(self.finite.check, self.kernels.sign.all_finite, vector)

    def sums(self, some: slice) -> Array | None:
        """Return the memory for vector + residual that is looked at, so that `renew` need not add again; or None.

        It is asked for all elements of a vector or for none.
        """
        if self._past is not None:
            return None
        self._summed = True
        return self._residual.following[some]

    def add(self, vector: Array, out: Array) -> None:
        """Overwrite `out` with vector + residual."""
        self.launch(self.kernels.arrays.compensate, vector, self._residual.current, None, out)

    def find(self, vector: Array, with_residual: bool) -> None:
        """Make the places those of the largest of vector + residual, on a device, and check that.

        Without the residual nothing is checked.
        """
        for run in self.runs:
            some, select = run.elements, self._selectors[run.chunk, run.keep]
            indices, found = self._indices.there[run.values], self._picked[run.values]
            if with_residual:
                old, sums = self._residual.current[some], self.sums(some)
                self.launch(self.finite.check, select, vector[some], old, indices, found, sums)
            else:
                self.launch(select, vector[some], None, indices, found)
            self.place(run, indices)

    def fetch_indices(self) -> Testable | None:
        """Copy the indices of `find` to the host."""
        return self._indices.fetch()

    def place_all(self) -> None:
        """Make the places those of the host's indices."""
        self._indices.deliver()
        for run in self.runs:
            self.place(run, self._indices.there[run.values])

    def place(self, part: Part, indices: Array) -> None:
        """Set the places of a part to these indices within its blocks."""
        expand, places = self.kernels.sparse.expand, self.places[part.values]
        self.launch(expand, indices, part.chunk, part.keep, part.start, part.stop, places)

    def draw_places(self, part: Part, schedule: Array, step: np.uint64, source: np.uint64) -> None:
        """Draw the places of a part, one of each block."""
        draw, places = self.kernels.sparse.draw_strata, self.places[part.values]
        self.launch(draw, schedule, part.first, step, source, part.chunk, part.start, part.stop, places)

    @override
    def encode(self, piece: int) -> Testable | None:
        """Take the values at the places; there is one piece. They and `finite` are known once the handle completes."""
        picked = self.vector, self._residual.current, self.places, self._past, self._picked, self._kept
        self.launch(self.kernels.sparse.pick, *picked)
        return None if self._flags is None else self._flags.fetch()

    @override
    def report(self, row: Doubles) -> None:
        # the sum of finite values and a finite residual may have overflowed
        row[0] = _GOOD if self.finite else _OVERFLOWED if self.all_finite(self._given) else _BAD

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        if reports.any():
            return Problem(bad_ranks(reports[:, 0] == _BAD))
        # the means are equal on all ranks; they are not finite if the values of several ranks are too large
        return None if nonfinite.all_finite_result(self.means, self._result_type) else Problem()

    # While they travel -----------------------------------------------------------------------------------------------

    def clear(self, share: Part) -> None:
        """Fill a share of the result with zeros."""
        if self.space.is_host:
            self._out[share.elements] = 0
        else:
            self.launch(self._out.zero_)

    def renew(self, share: Part) -> None:
        """Make a share of the residual of the next step; `commit` puts it into force once all are made."""
        self._begun = True
        some, values = share.elements, share.values
        kept_values = None if self._kept is None else self._kept[values]
        old, scales, among = self._residual.current[some], (self._past, self._gain), self.places[values]
        x = None if self._summed else self.vector[some]
        following = self._residual.following[some]
        self.launch(self.kernels.sparse.remember, x, old, *scales, share.start, among, kept_values, following)
        if self._masks:
            self.launch(
                self.kernels.sparse.remember, None, old, None, None, share.start, among, None, self.vector[some]
            )

    @override
    def decode(self, piece: int) -> Testable | None:
        """Write the means to their places."""
        self._arrived.deliver()
        self.launch(self.kernels.sparse.put, self._arrived.there, self.places, self.space.words(self._out))
        return self.space.done()
