"""Feedback of low-rank factors: a residual, and the right factors of matrices, which are kept from step to step.

    M = G + E;  p = q M^T                        encode
    p <- orthonormal(mean of p);  q = p M        encode_back
    result = p^T (mean of q);  E <- M - result   decode
    q <- orthonormal(mean of q)                  end_decoding

The rows of p and q are the columns of the paper's P and Q. A row of q that depends on the rows before it, as all do for
a matrix of zeros, could never recover, so it is drawn again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from collectives.annotations import Doubles, FloatArray, override
from collectives.arrays.elements import NARROW, aligned_empty
from mpicomp.feedback.base import Feedback, Problem, Residual, State, StepInput, bad_ranks, compute_type, narrow_into
from mpicomp.feedback.rounds import Round
from mpicomp.feedback.scale_groups import padded_lengths, why
from mpicomp.kernels.streams import Stream, bernoulli_table, source
from mpicomp.spaces import HOST

SHARE_ELEMENTS = 1 << 18  # of a matrix, that one call of a kernel works on


class Block(NamedTuple):
    """A matrix in a vector; or, with rank 0, elements that are sent as they are.

    `left` are the places of p, or of these elements, among the numbers of the first message, `right` those of q in the
    second one.
    """

    start: int
    rows: int
    cols: int
    rank: int
    left: slice
    right: slice

    def elements(self, first: int, stop: int) -> slice:
        """Return the elements of the vector in some rows."""
        return slice(self.start + first * self.cols, self.start + stop * self.cols)

    def factor(self, numbers: FloatArray) -> FloatArray:
        """Return a factor [rank, rows] or [rank, cols]."""
        return numbers.reshape(self.rank, -1)


def cut_into_blocks(
    n: int, lengths: Sequence[int] | None, shapes: Sequence[Sequence[int]] | None, rank: int
) -> Iterator[Block]:
    """Yield the blocks of a vector, in order: padding counts as elements that are sent as they are.

    A tensor is a matrix if its factors are shorter. Without a shape it is one as near to a square as its length allows.

    Raises
    ------
    ValueError
        The tensors do not fill the vector.
    """
    start = left = right = 0
    if not n:
        return
    for index, (length, padded) in enumerate(zip(*padded_lengths(lengths, n), strict=True)):
        rows = math.isqrt(length) if shapes is None else shapes[index][0] if len(shapes[index]) > 1 else 1
        cols, stop = int(length) // max(rows, 1), start + int(padded)
        if rank * (rows + cols) < rows * cols:
            ends = left + rank * rows, right + rank * cols
            yield Block(start, rows, cols, rank, slice(left, ends[0]), slice(right, ends[1]))
            (left, right), start = ends, start + rows * cols
        if start < stop:
            yield Block(start, 1, stop - start, 0, slice(left, left + stop - start), slice(right, right))
            left, start = left + stop - start, stop


def _largest(values: FloatArray) -> float:
    """Return the largest magnitude, or NaN, without memory for magnitudes."""
    return float(max(values.max(), -values.min()))


class LowRank(Feedback):
    """Residual and right factors of one vector, and the numbers of its two messages.

    Parameters
    ----------
    n : int
    dtype : str
    blocks : sequence of Block
    stream : Stream
        Source of the first right factors; equal on all ranks.
    largest : float
        Largest number of `dtype`.

    Attributes
    ----------
    left : float32[k] or float64[k]
        Left factors and elements that are sent as they are: this rank's after `encode`, to be replaced by their mean.
    right : float32[k] or float64[k]
        The right factors: this rank's after `encode_back`, to be replaced by their mean.
    matrices : list of Block
    matrix_rows : list of int
        Compared by the ranks before their calls.
    shares : list of (Block, first row, last row + 1)
        The pieces of `encode` and `decode`.
    """

    n_reports = 1
    reports_when: Literal["beside"] = "beside"

    def __init__(self, n: int, dtype: str, blocks: Sequence[Block], stream: Stream, largest: float) -> None:
        compute, sizes = compute_type(dtype), (blocks[-1].left.stop, blocks[-1].right.stop) if blocks else (0, 0)
        self._residual = Residual(HOST, n, compute)
        self._factors = Residual(HOST, sizes[1], compute, "shared")
        super().__init__(HOST, {"residual": self._residual, "factors": self._factors})
        self.left: FloatArray = aligned_empty(sizes[0], compute)
        self._dtype, self._stream, self._is_wide = dtype, stream, dtype in NARROW
        self._largest, self._limit, self._epsilon = largest, float(np.finfo(compute).max), float(np.finfo(compute).eps)
        self.matrices = [block for block in blocks if block.rank]
        self.matrix_rows = [block.rows for block in self.matrices]
        self.shares = list[tuple[Block, int, int]]()
        for block in blocks:
            step = max(4, SHARE_ELEMENTS // block.cols // 4 * 4)  # kernels take four rows at a time
            self.shares += [(block, k, min(k + step, block.rows)) for k in range(0, block.rows, step)]
        self._sums, self._results = np.zeros((2, len(self.shares)))  # largest magnitudes
        self._have_residual = np.array([block.rank > 0 for block, *_ in self.shares], bool)
        self._call: StepInput | None = None
        self.right[:] = 0
        self._orthonormalize_right(0)
        self._factors.commit()

    @property
    def right(self) -> FloatArray:
        """See the attributes."""
        numbers: FloatArray = self._factors.following
        return numbers

    @override
    def rounds(self) -> tuple[Round, ...]:
        shares, matrices = len(self.shares), len(self.matrices)
        return (
            Round(self.encode, self.decode, numbers=lambda: (self.left, self.left), pieces=(shares, 0)),
            Round(self.encode_back, self.decode, numbers=lambda: (self.right, self.right), pieces=(matrices, shares)),
        )

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        self._call, self._values = call, call.values

    @override
    def encode(self, piece: int) -> None:
        block, first, stop = self.shares[piece]
        some, left = block.elements(first, stop), self.left[block.left]
        values, residual, sums = self._values[some], self._residual.current[some], self._residual.following[some]
        if block.rank:
            q, p = block.factor(self._factors.current[block.right]), block.factor(left)
            self._sums[piece] = self.kernels.low_rank.project(values, residual, q, first, sums, p)
        else:
            self.kernels.arrays.compensate(values, residual, None, left)
            self._sums[piece], sums[:] = _largest(left), 0

    @override
    def report(self, row: Doubles) -> None:
        row[0] = self._sums[self._have_residual].max(initial=0)
        if not np.isfinite(self._sums).all():
            row[0] = why(self.all_finite(self._values))

    def encode_back(self, matrix: int) -> None:
        """Make the mean p of a matrix orthonormal, and compute this rank's q. Columns of P without a rest become 0."""
        block = self.matrices[matrix]
        p, q = block.factor(self.left[block.left]), block.factor(self.right[block.right])
        self.kernels.low_rank.orthonormalize(p, self._epsilon)
        sums = self._residual.following[block.elements(0, block.rows)]
        self.kernels.low_rank.project_back(sums, p, 0, block.cols, q)

    @override
    def decode(self, piece: int) -> None:
        assert self._call is not None
        block, first, stop = self.shares[piece]
        some, left = block.elements(first, stop), self.left[block.left]
        out, rest = self._call.out[some], self._residual.following[some]
        result = self._values[some] if self._is_wide else out
        if block.rank:
            p, q, sums = block.factor(left), block.factor(self.right[block.right]), None if self._is_wide else rest
            self._results[piece] = self.kernels.low_rank.expand(p, first, q, sums, result)
        else:
            result[:], self._results[piece] = left, _largest(left)
        if self._is_wide:
            narrow_into(result, self._dtype, out)
            if block.rank:  # the residual takes up the rounding as well
                self.kernels.sixteen_bits.widen(out.view(np.uint16), self._dtype == "bfloat16", result)
                self.kernels.arrays.keep(rest, result, None, None, rest)

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        # the results are equal on all ranks, so all go on or none: where the next residuals cannot overflow
        result, everyones = float(self._results.max(initial=0)), float(reports.max(initial=0))
        ours = float(self._results[self._have_residual].max(initial=0))
        if result <= self._largest and ours + everyones <= self._limit:  # False for NaN
            return None
        return Problem(bad_ranks(np.isnan(reports[:, 0])))

    @override
    def end_decoding(self, call: StepInput) -> None:
        self._orthonormalize_right(call.step + 1)

    def _orthonormalize_right(self, step: int) -> None:
        """Make all q orthonormal. Rows of zeros are drawn from -1 to 1, the same on all ranks."""
        words = None
        for block in self.matrices:
            q = block.factor(self.right[block.right])
            if self.kernels.low_rank.orthonormalize(q, self._epsilon):
                if words is None:  # once for all matrices
                    words = np.empty(-(-self.right.size // 16) * 8, np.uint64)
                    place = self._stream.schedule(), np.uint64(0), np.uint64(step), source(0)
                    self.kernels.philox.draw_words(*place, *bernoulli_table(1, 1), words[:0], words)
                lost = ~q.any(axis=1)
                q[lost] = block.factor(words.view(np.int32)[block.right])[lost] * q.dtype.type(2**-31)
                self.kernels.low_rank.orthonormalize(q, self._epsilon)

    @override
    def end(self) -> None:
        super().end()
        self._call, self._values = None, self.left[:0]

    @override
    def load(self, state: State) -> str:
        super().load(state)
        return f"factors {hashlib.blake2b(state['factors'].tobytes(), digest_size=8).hexdigest()}"
