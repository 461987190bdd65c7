"""Ternary quantization: the signs of some elements, times a scale that keeps the bucket's length.

Wire format: that of `mpicomp.codecs.quantizer`, with one level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from collectives.annotations import Array, Bytes, override
from mpicomp import kernels
from mpicomp.codecs.base import Draw, Finite
from mpicomp.codecs.bucketed import norms, to_float32
from mpicomp.codecs.options import choice
from mpicomp.codecs.quantizer import Quantizer


@dataclass(frozen=True, slots=True)
class Ternary(Quantizer):
    """Ternary quantization that keeps the bucket's length; biased.

    An element is its sign with probability |x_i| / ||x||_inf, else 0, times ||x||_2 / sqrt(number of signs). A bucket
    without a sign decodes to zeros.

    Parameters
    ----------
    bucket, coding, correlated
        As in `Quantizer`.
    levels : int
        Always 1.
    norm : str
        Always "linf".

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    The ternary QSGD in the comparison of DoubleSqueeze (Tang et al., ICML 2019, arXiv 1905.05957).

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, Ternary
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = Ternary(), np.array([2.0, -2.0, 0.0, 0.0], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    True
    >>> codec.decode(payload, values, weight=1)
    >>> values
    array([ 2., -2.,  0.,  0.], dtype=float32)
    """

    levels: int = 1
    norm: Literal["l2", "linf"] = "linf"

    def __post_init__(self) -> None:
        Quantizer.__post_init__(self)
        choice(self, "levels", (1,))
        choice(self, "norm", ("linf",))

    @override
    def _encode(self, values: Array, payload: Bytes, sent: Array | None, draw: Draw) -> Finite:
        return self._encode_drawn(values, payload, sent, draw)

    @override
    def _draw_codes(self, values: Array, draw: Draw) -> tuple[Array, Array, Finite]:
        scales, finite = self._scale(values)
        codes, arrays = self.codes(values, scales, draw), kernels.beside(values).arrays
        n_signs = norms(arrays.convert(codes != 0, "float32"), self.bucket, "l1")
        # the scales sent differ from those by which levels were drawn
        found = norms(values, self.bucket, "l2") / arrays.xp.sqrt(arrays.xp.clip(n_signs, 1, None))
        return codes, to_float32(found), finite
