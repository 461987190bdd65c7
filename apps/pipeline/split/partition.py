"""Examples of clients whose labels are skewed: each class is shared out by a draw of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_TRIES = 1000


def dirichlet(
    labels: NDArray[np.int64], clients: int, concentration: float, generator: np.random.Generator, *, least: int = 1
) -> list[Ids]:
    """Share out all examples; return those of each client, in ascending order. ValueError: too few examples."""
    for _ in range(_TRIES if clients * least <= len(labels) else 0):
        owners = np.empty(len(labels), np.int64)
        # each class's shares are drawn: the less the concentration, the more are labels skewed
        for label in np.unique(labels):
            of_class = generator.permutation(np.flatnonzero(labels == label))
            shares = generator.dirichlet(np.full(clients, concentration))
            ends = np.round(np.cumsum(shares) * of_class.size).astype(np.int64)
            owners[of_class] = np.searchsorted(ends[:-1], np.arange(of_class.size), side="right")
        # else the shares are drawn again
        if np.bincount(owners, minlength=clients).min() >= least:
            return [np.flatnonzero(owners == client) for client in range(clients)]
    raise ValueError(
        f"{len(labels)} examples are not shared out so that each of {clients} clients has {least}: take more examples, "
        "fewer clients or a larger concentration"
    )
