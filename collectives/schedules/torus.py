"""Two-dimensional torus all-reduce: reduce-scatter along rows, all-reduce along columns, all-gather along rows.

Four ranks as 2 x 2, rank = row * cols + col; chunks a0 a1 (for column 0) and b0 b1 (for column 1), the digit being the
row that owns it::

    0 --- 1         step 0  rows     0 sends b0 b1 to 1, 1 sends a0 a1 to 0, likewise 2 and 3    1 rank in each message
    |     |         step 1  columns  0 sends a1 to 2, 2 sends a0 to 0, likewise 1 and 3 with b   2 ranks
    2 --- 3         step 2  columns  0 sends a0 to 2, 2 sends a1 to 0, likewise 1 and 3 with b   4 ranks, overwriting
                    step 3  rows     0 sends a0 a1 to 1, 1 sends b0 b1 to 0, likewise 2 and 3    4 ranks, overwriting

Rounds 2 (R - 1) + 2 (C - 1); bytes sent per rank 2 (M - 1)/M of the vector as in a ring, of which only 2 (R - 1)/M
travel along columns. So ranks that are near each other belong in one row.

Reference: H. Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash",
arXiv:1811.05233 (2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from collectives.schedules.plan import Plan, TopologyError
from collectives.schedules.ring import Index, LockstepExchange, all_gather, lockstep_plan, reduce_scatter


@dataclass(frozen=True, slots=True)
class Torus:
    """Two-dimensional torus; neighbouring ranks share a row.

    Parameters
    ----------
    rows, cols : int or None
        Shape. One left out follows from the other and the number of ranks; both left out give the most square shape,
        with no more rows than columns.

    Examples
    --------
    >>> import mpicomp
    >>> from collectives import Torus
    >>> Torus(rows=2).shape(8)
    (2, 4)
    >>> mpicomp.run_local(4, lambda comm: comm.allreduce(1.5), topology=Torus())
    [6.0, 6.0, 6.0, 6.0]
    >>> len(Torus().plan(rank=0, size=16).steps)
    12
    """

    name = "torus"
    rows: int | None = None
    cols: int | None = None

    def shape(self, size: int) -> tuple[int, int]:
        """Return the number of rows and of columns for ``size`` ranks.

        Raises
        ------
        TopologyError
            ``rows`` x ``cols`` is not ``size``.
        """
        divisors = [rows for rows in range(1, isqrt(size) + 1) if size % rows == 0]
        fitting = [(rows, size // rows) for rows in divisors]
        fitting += [(cols, rows) for rows, cols in reversed(fitting) if rows != cols]
        if self.rows is None and self.cols is None:
            return divisors[-1], size // divisors[-1]
        for rows, cols in fitting:
            if self.rows in (None, rows) and self.cols in (None, cols):
                return rows, cols
        wanted = " x ".join("any" if side is None else str(side) for side in (self.rows, self.cols))
        options = ", ".join(f"{rows} x {cols}" for rows, cols in fitting)
        raise TopologyError(f"{size} ranks do not fill a torus of {wanted} rows x columns; these shapes fit: {options}")

    def exchanges(self, rank: Index, size: int) -> Iterator[LockstepExchange]:
        """Yield the steps of `rank`, an int or an array of ranks, among `size` ranks.

        Column c has the chunks from c * rows to (c + 1) * rows.
        """
        rows, cols = self.shape(size)
        row, col = rank // cols, rank % cols
        right, left = row * cols + (col + 1) % cols, row * cols + (col - 1) % cols
        down, up = (rank + cols) % size, (rank - cols) % size
        for sent, received, weight in reduce_scatter(col, cols):
            yield LockstepExchange(right, left, sent * rows, received * rows, rows, weight, 1)
        for sent, received, weight in reduce_scatter(row, rows):
            yield LockstepExchange(down, up, col * rows + sent, col * rows + received, 1, weight * cols, cols)
        for sent, received in all_gather(row, rows):
            yield LockstepExchange(down, up, col * rows + sent, col * rows + received, 1, size, 0)
        for sent, received in all_gather(col, cols):
            yield LockstepExchange(right, left, sent * rows, received * rows, rows, size, 0)

    def plan(self, rank: int, size: int) -> Plan:
        """Return the part of rank ``rank`` among ``size`` ranks; raises TopologyError if the shape does not fit."""
        return lockstep_plan(rank, size, size, self.exchanges(rank, size))
