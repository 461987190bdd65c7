"""The vectors that an aggregator is started for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.arrays.elements import FLOATS, SIXTEEN_BIT


@dataclass(frozen=True)
class VectorSpec:
    """The vectors that an aggregator is started for.

    Attributes
    ----------
    n : int
        Elements.
    dtype : str
        float16, bfloat16, float32 or float64.
    vector_id : int
        Tells vectors under one seed apart, so that they do not share random numbers.
    tensor_lengths : tuple of int, optional
        Lengths of the tensors in the vector.
    device : str
        Where the vectors are encoded: "cpu", or "cuda" or "cuda:1", where they then are.
    tensor_shapes : tuple of tuple of int, optional
        Shapes of the tensors in the vector, for methods that need rows and columns.

    Raises
    ------
    TypeError, ValueError
        No such vectors can be aggregated.
    """

    n: int
    dtype: str
    vector_id: int = 0
    tensor_lengths: tuple[int, ...] | None = None
    device: str = "cpu"
    tensor_shapes: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS:
            raise TypeError(f"cannot aggregate vectors of type {self.dtype}: choose one of {', '.join(FLOATS)}")
        if self.n < 0:
            raise ValueError(f"a vector has 0 or more elements, not {self.n}")

    @property
    def sixteen_bit(self) -> bool:
        """Whether vectors are widened to float32 for computing."""
        return self.dtype in SIXTEEN_BIT

    @property
    def compute(self) -> np.dtype[Any]:
        """What methods compute in: float32, or float64."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    @property
    def stored(self) -> np.dtype[Any]:
        """NumPy's type of the vectors; uint16 stands for bfloat16."""
        return np.dtype(np.uint16 if self.dtype == "bfloat16" else self.dtype)
