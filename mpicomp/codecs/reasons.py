"""Why a sum over a rank's vector is not finite: the sum itself says so, and needs no message beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels


def tell_why(sums: NDArray[np.float64], values: NDArray[Any]) -> None:
    """Overwrite sums, of which one is not finite, by the reason.

    The reason is NaN where the vector itself holds NaN or infinity, and infinity where finite numbers overflowed. Only
    ranks whose sums are NaN are to be blamed.
    """
    sums[:] = np.inf if kernels.of("cpu").sign.all_finite(values) else np.nan
