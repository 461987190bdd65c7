"""Reports of the ranks about their signs, and the global steps that follow from them."""

from __future__ import annotations

import numpy as np
from numba import float64

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.vote_counts import segment_totals


@kernel
def add_up(sums, firsts, clipped, report):
    """Write a rank's report: the number of elements clipped, then the sum of |u| of each segment.

    Returns whether all sums are finite. sums, firsts : as in `vote_counts.segment_totals`. report : float64[1 +
    segments], overwritten.
    """
    report[0] = clipped
    return segment_totals(sums, firsts, report[1:])


@kernel
def follow(gathered, counts, average, magnitudes):
    """Update the running magnitudes from the gathered reports; return the number of clipped elements.

    gathered : float64[ranks, 1 + segments], clipped elements and sums of |u|; summed in rank order.
    counts : float64[segments], elements over all ranks. average : weight of the past.
    magnitudes : float64[segments], overwritten; NaN: no past.

    Returns
    -------
    float
        Clipped elements; NaN if a sum is not finite, and then `magnitudes` is unchanged.
    """
    clipped, everything = float64(0), float64(0)
    for rank in range(gathered.shape[0]):
        clipped += gathered[rank, 0]
        for segment in range(magnitudes.size):
            everything += gathered[rank, 1 + segment]
    if not np.isfinite(everything):
        return np.nan
    for segment in range(magnitudes.size):
        total = float64(0)
        for rank in range(gathered.shape[0]):
            total += gathered[rank, 1 + segment]
        mean = total / counts[segment]
        past = magnitudes[segment]
        magnitudes[segment] = average * past + (1 - average) * mean if past == past else mean
    return clipped


@kernel
def set_steps(magnitudes, gamma, clip, positive, negative, limits):
    """Compute the step s = gamma a of each segment, -s, and the residual's limit clip * s, at most the largest number.

    magnitudes : float64[segments]; positive, negative, limits : float32[segments] or float64[segments], overwritten.

    Returns
    -------
    bool
        Whether all steps are finite.
    """
    finite, most = True, np.finfo(positive.dtype).max
    for segment in range(magnitudes.size):
        step = positive.dtype.type(gamma * magnitudes[segment])
        positive[segment], negative[segment] = step, -step
        limit = step * positive.dtype.type(clip)
        limits[segment] = limit if limit < most else most  # infinity is clipped as well, and 0 * infinity is NaN
        finite = finite and np.isfinite(step)
    return finite
