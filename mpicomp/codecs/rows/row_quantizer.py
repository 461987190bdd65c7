"""Rows of a few bits: activations and their gradients between the stages of a pipeline (AQ-SGD).

A row is the last dimension, a token's vector. It has one scale, and 2^b levels that lie symmetrically about 0:

    b = 1       sgn(x_i) times the mean magnitude; sgn(0) = +1
    nearest     scale = max |x_i|; the centres of 2^b intervals that fill -scale .. scale
    stochastic  scale = max |x_i|; 2^b levels from -scale to scale, drawn so that the mean is x_i to 2^-16 of the
                distance between levels

Centres are closer together than levels from end to end: their intervals are shorter by a factor of (2^b - 1) / 2^b. The
error of rows of 256 normal values, relative to their norm, is as follows. So centres serve every b.

    bits        2       3       4       6       8
    centres     0.445   0.223   0.111   0.0278  equal
    end to end  0.596   0.253   0.118   0.0281  equal

`encode_delta` packs Q(values - message) and adds the decoded payload to the message. `decode_delta` does the same
addition on the other end, so the two messages stay equal, bit by bit.

Wire format: the scales, float16 or float32, then ceil(b columns / 8) bytes of codes for each row
(`mpicomp.kernels.cpu.row_codes`). So row r's codes begin at the byte rows s + r ceil(b columns / 8), s the bytes of a
scale.

float16 scales are rounded up (b = 1: to nearest). The smallest scale is 2^-24 (float32: 2^-100). Where rounding is to
nearest, rows below half of it decode to 0; where it is stochastic, they take the smallest scale and stay unbiased.

The random words of a row depend on the stream, step, rank, the row's key and the column alone, not on the batch that
the row is in.

Reference: AQ-SGD (Wang et al., NeurIPS 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from collectives.annotations import Bytes, Words, override
from mpicomp import kernels
from mpicomp.codecs import options
from mpicomp.codecs.base import Draw
from mpicomp.codecs.rows.row_codec import AddingRows, Keys, Rows, check_pair, check_payload, check_rows

_NO_KEYS, _NO_SCHEDULE = np.zeros(0, np.int64), np.zeros(56, np.uint64)
_MOST_GROUPS = 1 << 54  # that a stream can number


@dataclass(frozen=True, slots=True)
class RowQuantizer(AddingRows):
    """Encodes each element in a few bits and each row with one scale.

    Parameters
    ----------
    bits : int
        1 to 8.
    rounding : "nearest" or "stochastic"
        Stochastic rounding needs 2 bits or more.
    scale : "float16" or "float32"
        Rows with values beyond 65504 need float32.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import RowQuantizer
    >>> codec = RowQuantizer(bits=2)
    >>> values = np.array([[0.0, 1.0, -2.0, 4.0], [0.5, 0.25, 0.0, -0.5]], np.float32)
    >>> payload = np.empty(codec.nbytes(rows=2, columns=4), np.uint8)
    >>> codec.encode(values, payload)
    >>> values.nbytes, payload.nbytes
    (32, 6)
    >>> decoded = np.empty_like(values)
    >>> codec.decode(payload, decoded)
    >>> decoded
    array([[ 1.   ,  1.   , -1.   ,  3.   ],
           [ 0.375,  0.375,  0.125, -0.375]], dtype=float32)

    See Also
    --------
    FullRows : rows in full precision or 16 bits
    TopRows : the largest magnitudes of each row
    """

    bits: int = 4
    rounding: Literal["nearest", "stochastic"] = "nearest"
    scale: Literal["float16", "float32"] = "float16"

    def __post_init__(self) -> None:
        options.integer(self, "bits", 1, 8)
        options.choice(self, "rounding", ("nearest", "stochastic"))
        options.choice(self, "scale", ("float16", "float32"))
        if self.bits == 1 and self.rounding == "stochastic":
            raise ValueError(
                "bits must be 2 or more with rounding='stochastic': drawn signs err by 2.9 times the row and messages "
                "grow without bound; use rounding='nearest', or more bits"
            )

    @property
    def _unit(self) -> np.float32:
        """Distance of a level from 0, in scales, per unit of 2 code - 2^bits + 1."""
        centred = self.bits > 1 and self.rounding == "nearest"
        return np.float32(2.0**-self.bits) if centred else np.float32(1 / (2**self.bits - 1))

    @override
    def nbytes(self, rows: int, columns: int) -> int:
        return rows * ((2 if self.scale == "float16" else 4) + -(-self.bits * columns // 8))

    @override
    def encode(self, values: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None) -> None:
        check_rows("the values", values)
        self._encode(values, None, payload, draw, row_keys)

    @override
    def encode_delta(
        self, values: Rows, message: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None
    ) -> None:
        check_pair(values, message)
        self._encode(values, message, payload, draw, row_keys)

    def _encode(
        self, values: Rows, message: Rows | None, payload: Bytes, draw: Draw | None, row_keys: Keys | None
    ) -> None:
        check_payload(self, payload, values.shape)
        columns, random = values.shape[-1], self.rounding == "stochastic"
        keys, schedule, step, source = _NO_KEYS, _NO_SCHEDULE, np.uint64(0), np.uint64(0)
        if random:
            if draw is None:
                raise ValueError("rounding='stochastic' needs a draw: pass draw=Draw(stream, step, rank)")
            keys = _check_keys(row_keys, values.size // columns, columns)
            schedule, step, source = draw.stream.schedule(), np.uint64(draw.step & 0xFFFFFFFF), draw.source
        failed = kernels.of("cpu").rows.encode(
            values.reshape(-1), None if message is None else message.reshape(-1), columns, self.bits, self._unit,
            self.scale == "float16", random, keys, schedule, step, source, *_work(), payload,
        )  # fmt: skip
        if failed < 0:
            raise ValueError(
                f"the values contain NaN or infinity, first in row {-failed - 1}: the activations diverged"
            )
        if failed > 0:
            raise OverflowError(f"row {failed - 1} is too large for a float16 scale, beyond 65504: use scale='float32'")

    @override
    def _decode(self, payload: Bytes, out: Rows, adding: bool) -> None:
        sixteen = self.scale == "float16"
        kernels.of("cpu").rows.decode(
            payload, out.shape[-1], self.bits, self._unit, sixteen, adding, *_work(), out.reshape(-1)
        )


def _work() -> tuple[Bytes, Words]:
    tile = kernels.of("cpu").rows.TILE
    return np.empty(tile, np.uint8), np.empty(tile // 4, np.uint64)


def _check_keys(row_keys: Keys | None, rows: int, columns: int) -> Keys:
    if row_keys is None:
        return np.arange(rows, dtype=np.int64)
    most = _MOST_GROUPS // -(-columns // 512)
    if row_keys.shape != (rows,) or row_keys.dtype != np.int64:
        raise ValueError(f"row_keys must be int64[{rows}], one for each row, not {row_keys.dtype}{row_keys.shape}")
    if rows and (row_keys.min() < 0 or row_keys.max() >= most):
        raise ValueError(f"row_keys must lie in 0 .. {most - 1}, not {row_keys.min()} .. {row_keys.max()}")
    return np.ascontiguousarray(row_keys)
