"""How well a method does: how alike the ranks' residuals are, how good a choice of elements is, how true a sign.

Pure functions of arrays, for runs of a study; `gather_rows` brings the ranks' arrays together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator

Vector = NDArray[Any]


def gather_rows(comm: Communicator, vector: Vector) -> Vector:
    """Every rank's vector, one a row, on every rank; collective.

    Parameters
    ----------
    comm : Communicator
    vector : array[n]
        Of one length and type on all ranks. Of a long residual, pass a part: each rank gets M times as much.

    Returns
    -------
    array[M, n]

    Raises
    ------
    CollectiveMismatch
        The ranks' vectors differ in length or type.
    CollectiveTimeout, PeerFailure
    """
    rows: Vector = comm.allgather(np.ascontiguousarray(vector).reshape(1, -1))
    return rows


def cosine_distances(rows: Vector) -> NDArray[np.float64]:
    """1 - cos of the angle between each two rows: 0 alike, 1 at right angles, 2 opposite.

    rows : array[M, n]. Returns float64[M, M]; NaN where a row is all zeros.

    Figure 2 of ScaleCom draws it for the ranks' memories.
    """
    wide = np.asarray(rows, np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (wide @ wide.T) / np.outer(lengths, lengths)
    return 1.0 - np.clip(cosines, -1.0, 1.0)


def mean_cosine_distance(rows: Vector) -> float:
    """Of all pairs of different rows; NaN where there are none."""
    distances = cosine_distances(rows)
    pairs = distances[np.triu_indices(len(distances), 1)]
    return float(pairs.mean()) if pairs.size else float("nan")


def top_k(vector: Vector, k: int) -> NDArray[np.int64]:
    """Places of the `k` largest magnitudes, ascending; of equal ones the first.

    Raises
    ------
    ValueError
        There are not so many elements.
    """
    if not 0 <= k <= vector.size:
        raise ValueError(f"k must lie in 0 .. {vector.size}, the elements there are, not {k}")
    order = np.argsort(-np.abs(np.asarray(vector, np.float64)), kind="stable")
    return np.sort(order[:k])


def missed(chosen: NDArray[np.int64], true: NDArray[np.int64]) -> float:
    """d / k: which part of the `chosen` places is not among the `true` ones. 0: all are, 1: none is.

    Figure 3 of ScaleCom draws it for a leader's choice against the largest of the exact mean: half the Hamming distance
    of both sets, over their size k.

    Raises
    ------
    ValueError
        Nothing was chosen.
    """
    if not chosen.size:
        raise ValueError("chosen must name one place at least")
    return float(np.isin(chosen, true, invert=True).mean())


def contraction(vector: Vector, places: NDArray[np.int64]) -> float:
    """gamma: which part of the squared length is lost if only these places are kept.

    With the places of the largest elements it is gamma_0. 0 for a vector of zeros.
    """
    wide = np.asarray(vector, np.float64)
    whole = float(wide @ wide)
    return 1.0 - float(wide[places] @ wide[places]) / whole if whole else 0.0


def contraction_bound(missed_part: float, gamma_0: float) -> float:
    """d/k + (1 - d/k) gamma_0: no more is lost with places that miss d of the k largest (Lemma 1 of ScaleCom).

    Raises
    ------
    ValueError
        An argument is not within 0 and 1.
    """
    for name, value in (("missed_part", missed_part), ("gamma_0", gamma_0)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {value!r}")
    return missed_part + (1.0 - missed_part) * gamma_0


def matching_rate(result: Vector, exact: Vector) -> float:
    """Which part of the elements has the same sign in both; 0 counts as positive. NaN where there are none."""
    return float(((result >= 0) == (exact >= 0)).mean()) if result.size else float("nan")
