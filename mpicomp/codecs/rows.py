"""Rows of few bits: activations and their gradients between the stages of a pipeline (AQ-SGD).

A row is the last dimension, a token's vector. It has one scale, and 2^b levels that lie symmetrically about 0:

    b = 1       sgn(x_i) times the mean magnitude; sgn(0) = +1
    nearest     scale = max |x_i|; the centres of 2^b intervals that fill -scale .. scale
    stochastic  scale = max |x_i|; 2^b levels from -scale to scale, drawn so that the mean is x_i to 2^-16 of the
                distance between levels

Centres are nearer than levels from end to end, as the intervals are shorter by a factor of (2^b - 1) / 2^b. Of rows of
256 normal values the error is 0.445 of the norm with 2 bits, and 0.596 from end to end; 0.223 and 0.253 with 3 bits,
0.111 and 0.118 with 4, 0.0278 and 0.0281 with 6, the same with 8. So centres serve every b.

`encode_delta` packs Q(values - message) and adds what it decodes to to the message; `decode_delta` does the same
addition on the other end, so that the two messages stay equal, bit by bit.

Wire format: the scales, float16 or float32, then ceil(b columns / 8) bytes of codes for each row
(`mpicomp.kernels.cpu.rows`). So row r's codes begin at the byte rows s + r ceil(b columns / 8), s the bytes of a scale.

float16 scales are rounded up (b = 1: to nearest). The smallest scale is 2^-24 (float32: 2^-100). Where rounding is to
nearest, rows below half of it decode to 0; where it is stochastic, they take the smallest scale and stay unbiased.

Random words: those of a row depend on the stream, step, rank, the row's key and the column alone, not on the batch that
the row is in.

Reference: AQ-SGD (Wang et al., NeurIPS 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.codecs import options
from mpicomp.codecs.base import Bytes, Draw
from mpicomp.codecs.rows_base import Keys, Rows, check_pair, check_payload, check_rows

_NO_KEYS, _NO_SCHEDULE = np.zeros(0, np.int64), np.zeros(56, np.uint64)
_MOST_GROUPS = 1 << 54  # that a stream numbers


@dataclass(frozen=True, slots=True)
class RowQuantizer:
    """A few bits for each element and one scale for each row.

    Parameters
    ----------
    bits : int
        1 to 8.
    rounding : "nearest" or "stochastic"
        Stochastic rounding takes 2 bits or more.
    scale : "float16" or "float32"
        Rows beyond 65504 need float32.

    Raises
    ------
    ValueError
        An option is out of range.
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
        """Distance of a level from 0, in scales, for each unit of 2 code - 2^bits + 1."""
        centred = self.bits > 1 and self.rounding == "nearest"
        return np.float32(2.0**-self.bits) if centred else np.float32(1 / (2**self.bits - 1))

    def nbytes(self, rows: int, columns: int) -> int:
        """Exact size: the scales, and ceil(bits columns / 8) bytes for each row."""
        return rows * ((2 if self.scale == "float16" else 4) + -(-self.bits * columns // 8))

    def encode(self, values: Rows, payload: Bytes, draw: Draw | None = None, row_keys: Keys | None = None) -> None:
        """Overwrite the payload.

        Parameters
        ----------
        values : float32[..., columns]
        payload : uint8[nbytes(rows, columns)]
        draw : Draw, optional
            Stream, step and rank; for stochastic rounding alone. Its offset does not count.
        row_keys : int64[rows], optional
            A number for each row, 0 or more, such as example times tokens plus token. None: 0, 1, 2, ...

        Raises
        ------
        ValueError
            A row has NaN or infinity, or an array does not fit.
        OverflowError
            A row is beyond float16 scales.
        """
        check_rows("the values", values)
        self._encode(values, None, payload, draw, row_keys)

    def decode(self, payload: Bytes, values: Rows) -> None:
        """Overwrite the values. Raises ValueError for a payload of the wrong size."""
        self._decode(payload, values, False)

    def encode_delta(
        self,
        values: Rows,
        message: Rows,
        payload: Bytes,
        draw: Draw | None = None,
        row_keys: Keys | None = None,
    ) -> None:
        """Overwrite the payload with Q(values - message), and add what it decodes to to the message.

        Otherwise as `encode`. After an error the message is as before.
        """
        check_pair(values, message)
        if np.may_share_memory(values, message):
            raise ValueError("the values and the message share memory: pass a copy of the values")
        self._encode(values, message, payload, draw, row_keys)

    def decode_delta(self, payload: Bytes, message: Rows) -> None:
        """Add what the payload decodes to to the message. Raises ValueError for a payload of the wrong size."""
        self._decode(payload, message, True)

    def _encode(
        self,
        values: Rows,
        message: Rows | None,
        payload: Bytes,
        draw: Draw | None,
        row_keys: Keys | None,
    ) -> None:
        check_payload(self, payload, values.shape)
        columns, random = values.shape[-1], self.rounding == "stochastic"
        keys, schedule, step, source = _NO_KEYS, _NO_SCHEDULE, np.uint64(0), np.uint64(0)
        if random:
            if draw is None:
                raise ValueError("rounding='stochastic' needs a draw: pass draw=Draw(stream, step, rank)")
            keys = _checked_keys(row_keys, values.size // columns, columns)
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

    def _decode(self, payload: Bytes, out: Rows, adding: bool) -> None:
        check_rows("the message" if adding else "the values", out)
        check_payload(self, payload, out.shape)
        sixteen = self.scale == "float16"
        kernels.of("cpu").rows.decode(
            payload, out.shape[-1], self.bits, self._unit, sixteen, adding, *_work(), out.reshape(-1)
        )


def _work() -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Working memory of the kernels."""
    tile = kernels.of("cpu").rows.TILE
    return np.empty(tile, np.uint8), np.empty(tile // 4, np.uint64)


def _checked_keys(row_keys: Keys | None, rows: int, columns: int) -> Keys:
    if row_keys is None:
        return np.arange(rows, dtype=np.int64)
    most = _MOST_GROUPS // -(-columns // 512)
    if row_keys.shape != (rows,) or row_keys.dtype != np.int64:
        raise ValueError(f"row_keys must be int64[{rows}], one for each row, not {row_keys.dtype}{row_keys.shape}")
    if rows and (row_keys.min() < 0 or row_keys.max() >= most):
        raise ValueError(f"row_keys must lie in 0 .. {most - 1}, not {row_keys.min()} .. {row_keys.max()}")
    return np.ascontiguousarray(row_keys)
