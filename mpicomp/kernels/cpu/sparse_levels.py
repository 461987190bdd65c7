"""The largest elements of each tensor's chunks, and the four levels per tensor that they are rounded to.

`lengths`, int64[tensors], are the elements of each tensor, 1 or more. A tensor begins at the next multiple of 64
elements; its chunks count from there, and `keep` of each are kept as by `top_k.several`.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, njit, uint64

from mpicomp.kernels.cpu.arrays import compensate
from mpicomp.kernels.cpu.bucketed import as_float32
from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.ssdm import FLOAT32_MAX
from mpicomp.kernels.cpu.top_k import several


@njit(nogil=True, inline="always")
def _count_kept(n, chunk, keep):
    """Return the number of elements that are kept of a tensor of n."""
    return n // chunk * keep + (n % chunk * keep + chunk - 1) // chunk


@njit(nogil=True, inline="always")
def _behind(start, n):
    """Return the first element of the tensor behind one of n elements."""
    return start + (n + 63) // 64 * 64


@kernel
def select(x, residual, decay, left, lengths, chunk, keep, depth, mask, high, maxima, places, sizes, indices, values):
    """Find the largest magnitudes of x + decay residual in each chunk of each tensor.

    Parameters
    ----------
    x : float32[n] or float64[n]
    residual, decay, left : like x, scalar like x, like x; or None, None, None
        `left` is overwritten with x + decay residual in the tensors, and with 0 between them. None: x is searched.
    chunk, keep, depth, mask, high, maxima, places, sizes
        As in `top_k.several`.
    indices, values : uint32[k], like x [k]
        Overwritten with the places within the chunks, and with the elements there.

    Returns
    -------
    uint64
        The largest of all magnitudes.
    """
    most = uint64(0)
    begin = done = 0
    for n in lengths:
        for start in range(begin, begin + n, chunk):
            stop = min(begin + n, start + chunk)
            some = slice(done, done + _count_kept(stop - start, chunk, keep))
            chosen, found = indices[some], values[some]
            done = some.stop
            # the chunk is in the caches when it is searched
            if left is not None:
                p = left[start:stop]
                compensate(x[start:stop], residual[start:stop], decay, p)
                size = several(p, None, None, chunk, keep, depth, mask, high, maxima, places, sizes, chosen, found)
            else:
                v = x[start:stop]
                size = several(v, None, None, chunk, keep, depth, mask, high, maxima, places, sizes, chosen, found)
            most = max(most, size)
        stop = begin + n
        begin = _behind(begin, n)
        if left is not None:
            left[stop:begin] = 0
    return most


@njit(nogil=True, inline="always")
def _bound(value):
    return min(max(float64(value), -FLOAT32_MAX), FLOAT32_MAX)


@kernel
def quantize(values, lengths, chunk, keep, sums, counts, codes, levels):
    """Round the values of each tensor to four levels: the means of those in four equal intervals around the mean.

    Each interval is 6/4 standard deviations wide. All sums are in float64 and in the order of the values.

    Parameters
    ----------
    values : float32[k] or float64[k]
        The kept elements, finite; those beyond float32 count as its largest number.
    sums, counts : float64[4], int64[4]
        Working memory.
    codes : uint8[k]
        Overwritten with the levels' numbers, 0 to 3.
    levels : float32[4 tensors]
        Overwritten; the tensor's mean where no value has the level.
    """
    first = 0
    for t in range(lengths.size):
        count = _count_kept(lengths[t], chunk, keep)
        total = squares = float64(0)
        for j in range(first, first + count):
            total += _bound(values[j])
        mean = total / count
        for j in range(first, first + count):
            c = _bound(values[j]) - mean
            squares += c * c
        deviation = np.sqrt(squares / count)
        scale = 6 * deviation / 4 if deviation > 0 else float64(1)
        for q in range(4):
            sums[q], counts[q] = 0, 0
        for j in range(first, first + count):
            c = _bound(values[j]) - mean
            q = int64(min(max(np.rint(c / scale + 2), 0.0), 3.0))
            codes[j] = q
            sums[q] += c
            counts[q] += 1
        for q in range(4):
            levels[4 * t + q] = as_float32(mean + (sums[q] / counts[q] if counts[q] else 0.0))
        first += count


@kernel
def look_up(codes, lengths, chunk, keep, levels, values):
    """Compute the values of codes: the inverse of `quantize`. values : float32[k], overwritten."""
    j = 0
    for t in range(lengths.size):
        for _ in range(_count_kept(lengths[t], chunk, keep)):
            values[j] = levels[4 * t + int64(codes[j])]
            j += 1


@kernel
def spread(values, indices, lengths, chunk, keep, gain, out, adding):
    """Overwrite `out` with zeros and the values of each tensor's chunks, or with `adding` add the values to `out`.

    Parameters
    ----------
    values : float32[k]
        Values that are not finite count as 0.
    indices : uint32[k]
        Places within chunks; places outside move to the last element.
    gain : scalar like out
        Factor of the values.
    out : float32[n] or float64[n]
    adding : bool

    Returns
    -------
    bool
        Whether the elements that have received a value are finite.
    """
    begin = j = 0
    finite = True
    for n in lengths:
        stop = begin + n
        behind = _behind(begin, n)
        if not adding:
            out[begin:behind] = 0
        for start in range(begin, stop, chunk):
            end = min(start + chunk, stop)
            for _ in range(_count_kept(end - start, chunk, keep)):
                if np.isfinite(values[j]):
                    at = min(start + int64(indices[j]), end - 1)
                    out[at] = out[at] + gain * values[j] if adding else gain * values[j]
                    finite &= np.isfinite(out[at])
                j += 1
        begin = behind
    return finite
