"""Description of the vectors that an aggregator is started for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.arrays.elements import FLOATS, NARROW
from collectives.consistency.descriptions import fingerprint


@dataclass(frozen=True)
class VectorSpec:
    """Description of the vectors that an aggregator is started for.

    Parameters
    ----------
    n : int
        Number of elements.
    dtype : str
        float16, bfloat16, float32 or float64.
    vector_id : int
        Number of the vector. Vectors with one seed and different numbers use different random words.
    tensor_lengths : tuple of int, optional
        Lengths of the tensors in the vector.
    device : str
        Device that encodes: "cpu", or a GPU such as "cuda" or "cuda:1", which then holds the vectors.
    tensor_shapes : tuple of tuple of int, optional
        Shapes of the tensors in the vector, for methods that need rows and columns.

    Raises
    ------
    TypeError, ValueError
        Vectors of this type or length cannot be aggregated.

    Examples
    --------
    >>> from mpicomp.aggregator.algorithm import VectorSpec
    >>> spec = VectorSpec(1000, "bfloat16")
    >>> spec.is_narrow, str(spec.compute), str(spec.stored)
    (True, 'float32', 'uint16')
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

    def __str__(self) -> str:
        tensors = "" if self.tensor_lengths is None else f" in {tensors_listed(self.tensor_lengths)}"
        return f"{self.dtype}[{self.n}]{tensors} number {self.vector_id}"

    @property
    def is_narrow(self) -> bool:
        """True if vectors are widened to float32 for computing."""
        return self.dtype in NARROW

    @property
    def compute(self) -> np.dtype[Any]:
        """Type in which methods compute: float32 or float64."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    @property
    def stored(self) -> np.dtype[Any]:
        """NumPy type of the vectors; uint16 stands for bfloat16."""
        return np.dtype(np.uint16 if self.dtype == "bfloat16" else self.dtype)


def tensors_listed(lengths: Sequence[int]) -> str:
    """Return the lengths of tensors as text, abbreviated with a fingerprint if there are many."""
    if len(lengths) <= 8:
        return f"{len(lengths)} tensors {list(lengths)}"
    return f"{len(lengths)} tensors [{lengths[0]}, {lengths[1]}, ... #{fingerprint(str(list(lengths))):x}]"
