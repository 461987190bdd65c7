"""The largest magnitudes of each row in few bits: gradients on their way back in split learning (`bw8[0.2]`).

Wire format: the payload of the rows of what is kept, in ascending order of column (`mpicomp.codecs.rows`); then
ceil(columns / 8) bytes for each row, bit i of which, the lowest of a byte first, is 1 where column i is kept. With a
fifth of the columns kept and 8 bits, that is 2.6 bits an element. Columns' numbers would take less than these bits only
where less than one in log2(columns) is kept.

Reference: AQ-SGD (Wang et al., NeurIPS 2022), appendix on split learning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from mpicomp import kernels
from mpicomp.codecs import options
from mpicomp.codecs.base import Bytes, Draw
from mpicomp.codecs.rows import RowQuantizer
from mpicomp.codecs.rows_base import Keys, Rows, check_payload, check_rows
from mpicomp.codecs.top_k import Selector


@dataclass(frozen=True, slots=True)
class TopRows:
    """The largest magnitudes of each row, of equal ones the first; everything else decodes to 0.

    There is no form for differences from a message: gradients have none.

    Parameters
    ----------
    fraction : float
        Kept of each row, above 0 and at most 1; at least one element is.
    quantizer : RowQuantizer
        Of what is kept.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    fraction: float = 0.2
    quantizer: RowQuantizer = field(default_factory=lambda: RowQuantizer(8))

    def __post_init__(self) -> None:
        options.number(self, "fraction", "above 0 and at most 1", lambda part: 0 < part <= 1)
        options.require(isinstance(self.quantizer, RowQuantizer), "quantizer", "a RowQuantizer", self.quantizer)

    def kept(self, columns: int) -> int:
        """Elements of each row, rounded up: the fraction is taken as the decimal number it is written as."""
        return math.ceil(Fraction(repr(self.fraction)) * columns)

    def nbytes(self, rows: int, columns: int) -> int:
        """Exact size: the payload of what is kept, and a bit for each element, rounded up to bytes in each row."""
        return self.quantizer.nbytes(rows, self.kept(columns)) + rows * -(-columns // 8)

    def encode(self, values: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None) -> None:
        """Overwrite the payload; otherwise as `RowQuantizer.encode`."""
        check_rows("the values", values)
        check_payload(self, payload, values.shape)
        columns = values.shape[-1]
        rows, keep = values.size // columns, self.kept(columns)
        places, found = np.empty(rows * keep, np.uint32), np.empty((rows, keep), np.float32)
        if not Selector(columns, keep, np.float32)(values.reshape(-1), None, places, found.reshape(-1)):
            raise ValueError("the values contain NaN or infinity: the gradients diverged")
        size = self.quantizer.nbytes(rows, keep)
        self.quantizer.encode(found, payload[:size], draw, row_keys)
        kernels.of("cpu").rows.mark(places, columns, keep, payload[size:])

    def decode(self, payload: Bytes, values: Rows) -> None:
        """Overwrite the values. Raises ValueError for a payload of the wrong size."""
        check_rows("the values", values)
        check_payload(self, payload, values.shape)
        columns = values.shape[-1]
        rows, keep = values.size // columns, self.kept(columns)
        found, size = np.empty((rows, keep), np.float32), self.quantizer.nbytes(rows, keep)
        self.quantizer.decode(payload[:size], found)
        kernels.of("cpu").rows.spread(payload[size:], columns, keep, found.reshape(-1), values.reshape(-1))
