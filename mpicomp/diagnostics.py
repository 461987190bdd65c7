"""Measures of a method's quality: similarity of residuals, losses by a choice of elements, matching signs.

Pure functions of arrays for experiments; `gather_rows` brings the ranks' arrays together.
"""

from __future__ import annotations

import numpy as np

from collectives import Communicator
from collectives.annotations import AnyArray, Doubles, Indices


def gather_rows(comm: Communicator, vector: AnyArray) -> AnyArray:
    """Return every rank's vector as a row, on every rank; collective.

    Parameters
    ----------
    comm : Communicator
    vector : array[n]
        Vector of equal length and type on all ranks. Pass a part of a long residual, since a rank receives M times its
        size.

    Returns
    -------
    array[M, n]

    Raises
    ------
    CollectiveMismatch
        The ranks' vectors differ in length or type.
    CollectiveTimeout, PeerFailure

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> from mpicomp.diagnostics import gather_rows
    >>> mpicomp.run_local(2, lambda comm: gather_rows(comm, np.array([comm.rank, 5])).tolist())[0]
    [[0, 5], [1, 5]]
    """
    rows: AnyArray = comm.allgather(np.ascontiguousarray(vector).reshape(1, -1))
    return rows


def cosine_distances(rows: AnyArray) -> Doubles:
    """Return 1 - cos of the angle between each two rows: 0 for parallel, 1 for orthogonal, 2 for opposite rows.

    Figure 2 of ScaleCom shows it for the ranks' residuals.

    Parameters
    ----------
    rows : array[M, n]

    Returns
    -------
    float64[M, M]
        NaN where a row is all zeros.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.diagnostics import cosine_distances
    >>> cosine_distances(np.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])).tolist()
    [[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]
    """
    wide = np.asarray(rows, np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (wide @ wide.T) / np.outer(lengths, lengths)
    return 1.0 - np.clip(cosines, -1.0, 1.0)


def mean_cosine_distance(rows: AnyArray) -> float:
    """Return the mean distance of all pairs of different rows.

    Parameters
    ----------
    rows : array[M, n]

    Returns
    -------
    float
        0 to 2, see `cosine_distances`; NaN for a single row.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.diagnostics import mean_cosine_distance
    >>> mean_cosine_distance(np.array([[1.0, 0.0], [0.0, 2.0]]))
    1.0
    """
    distances = cosine_distances(rows)
    pairs = distances[np.triu_indices(len(distances), 1)]
    return float(pairs.mean()) if pairs.size else float("nan")


def top_k(vector: AnyArray, k: int) -> Indices:
    """Return the indices of the largest magnitudes; ties go to the lowest index.

    Parameters
    ----------
    vector : array[n]
    k : int
        Number of indices, 0 to n.

    Returns
    -------
    int64[k]
        Ascending.

    Raises
    ------
    ValueError
        The vector has fewer than `k` elements.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.diagnostics import top_k
    >>> top_k(np.array([1.0, -5.0, 3.0, 0.0]), k=2)
    array([1, 2])
    """
    if not 0 <= k <= vector.size:
        raise ValueError(f"k must lie in 0 .. {vector.size}, the elements there are, not {k}")
    order = np.argsort(-np.abs(np.asarray(vector, np.float64)), kind="stable")
    return np.sort(order[:k])


def missed(chosen: Indices, true: Indices) -> float:
    """Return d / k, the fraction of the `chosen` indices that is missing in `true`.

    Figure 3 of ScaleCom shows it for a leader's choice and the largest elements of the exact mean: half the Hamming
    distance of both sets, divided by their size k.

    Parameters
    ----------
    chosen, true : int[k]

    Returns
    -------
    float
        0 to 1.

    Raises
    ------
    ValueError
        `chosen` is empty.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.diagnostics import missed
    >>> missed(np.array([0, 1, 2, 3]), true=np.array([1, 2, 3, 4]))
    0.25
    """
    if not chosen.size:
        raise ValueError("chosen must have one index at least")
    return float(np.isin(chosen, true, invert=True).mean())


def contraction(vector: AnyArray, places: Indices) -> float:
    """Return gamma, the fraction of the squared length that is lost if only the elements at `places` remain.

    It is gamma_0 if the largest elements are kept, and 0 for a vector of zeros.

    Parameters
    ----------
    vector : array[n]
    places : int[k]
        Indices of the elements that remain.

    Returns
    -------
    float
        0 to 1.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.diagnostics import contraction
    >>> contraction(np.array([2.0, 0.0, 2.0, 2.0, 2.0]), places=np.array([0]))
    0.75
    """
    wide = np.asarray(vector, np.float64)
    whole = float(wide @ wide)
    return 1.0 - float(wide[places] @ wide[places]) / whole if whole else 0.0


def contraction_bound(missed_part: float, gamma_0: float) -> float:
    """Return d/k + (1 - d/k) gamma_0, a bound of the loss by indices that miss d of the k largest elements.

    Lemma 1 of ScaleCom proves it.

    Parameters
    ----------
    missed_part : float
        d/k, see `missed`.
    gamma_0 : float
        See `contraction`.

    Returns
    -------
    float
        0 to 1.

    Raises
    ------
    ValueError
        An argument is not between 0 and 1.

    Examples
    --------
    >>> from mpicomp.diagnostics import contraction_bound
    >>> contraction_bound(missed_part=0.5, gamma_0=0.5)
    0.75
    """
    for name, value in (("missed_part", missed_part), ("gamma_0", gamma_0)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {value!r}")
    return missed_part + (1.0 - missed_part) * gamma_0


def matching_rate(result: AnyArray, exact: AnyArray) -> float:
    """Return the fraction of elements that have the same sign in both vectors; 0 counts as positive.

    Parameters
    ----------
    result, exact : array[n]

    Returns
    -------
    float
        0 to 1; NaN for empty vectors.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.diagnostics import matching_rate
    >>> matching_rate(np.array([1.0, -1.0, 1.0, 1.0]), exact=np.array([0.5, -3.0, -0.1, 0.0]))
    0.75
    """
    return float(((result >= 0) == (exact >= 0)).mean()) if result.size else float("nan")
