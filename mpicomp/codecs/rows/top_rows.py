"""The largest magnitudes of each row in few bits: gradients on their way back in split learning (`bw8[0.2]`).

Wire format: the payload of the rows of kept elements, in ascending order of column (`mpicomp.codecs.rows`), then
ceil(columns / 8) bytes for each row. Bit i of these, the lowest of a byte first, is 1 where column i is kept. With a
fifth of the columns kept and 8 bits, that is 2.6 bits an element. Column numbers would be shorter than these bits only
where less than one in log2(columns) is kept.

Reference: AQ-SGD (Wang et al., NeurIPS 2022), appendix on split learning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from collectives.annotations import Bytes, override
from mpicomp import kernels
from mpicomp.codecs import options
from mpicomp.codecs.base import Draw
from mpicomp.codecs.rows.row_codec import Keys, RowCodec, Rows, check_payload, check_rows
from mpicomp.codecs.rows.row_quantizer import RowQuantizer
from mpicomp.codecs.top_k import Selector


@dataclass(frozen=True, slots=True)
class TopRows(RowCodec):
    """Sends the largest magnitudes of each row, of equal ones the first; all other elements decode to 0.

    Differences to a message cannot be sent: gradients have no message.

    Parameters
    ----------
    fraction : float
        Part of each row that is kept, above 0 and at most 1; at least one element is kept.
    quantizer : RowQuantizer
        Codec of the kept elements.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import TopRows
    >>> codec = TopRows(fraction=0.25)
    >>> values = np.array([[1, -8, 2, 0, 3, 1, 8, 1]], np.float32)
    >>> payload = np.empty(codec.nbytes(rows=1, columns=8), np.uint8)
    >>> codec.encode(values, payload)
    >>> payload.nbytes
    5
    >>> codec.decode(payload, values)
    >>> values
    array([[ 0.     , -7.96875,  0.     ,  0.     ,  0.     ,  0.     ,
             7.96875,  0.     ]], dtype=float32)
    """

    fraction: float = 0.2
    quantizer: RowQuantizer = field(default_factory=lambda: RowQuantizer(8))

    def __post_init__(self) -> None:
        options.number(self, "fraction", "above 0 and at most 1", lambda part: 0 < part <= 1)
        options.require(isinstance(self.quantizer, RowQuantizer), "quantizer", "a RowQuantizer", self.quantizer)

    def kept(self, columns: int) -> int:
        """Return the kept elements of each row, rounded up; the fraction counts as the decimal number of its repr."""
        return math.ceil(Fraction(repr(self.fraction)) * columns)

    @override
    def nbytes(self, rows: int, columns: int) -> int:
        return self.quantizer.nbytes(rows, self.kept(columns)) + rows * -(-columns // 8)

    @override
    def encode(self, values: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None) -> None:
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

    @override
    def decode(self, payload: Bytes, values: Rows) -> None:
        check_rows("the values", values)
        check_payload(self, payload, values.shape)
        columns = values.shape[-1]
        rows, keep = values.size // columns, self.kept(columns)
        found, size = np.empty((rows, keep), np.float32), self.quantizer.nbytes(rows, keep)
        self.quantizer.decode(payload[:size], found)
        kernels.of("cpu").rows.spread(payload[size:], columns, keep, found.reshape(-1), values.reshape(-1))
