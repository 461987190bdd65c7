"""The largest magnitudes of each chunk of a vector, or of a vector and a residual that is added on the fly.

Magnitudes are compared as unsigned integers, a float's bits without its sign. NaN and infinity are then above all
numbers, so the largest magnitude shows whether there are any.

One of each chunk: its maximum, then the first place that has it. Several: disjoint groups of elements have their maxima
taken, 16 groups side by side. A bound that k of these maxima reach is reached by at least k elements, and by few more.
Only these candidates are compared exactly, while the chunk is still in the caches.
"""

from __future__ import annotations

from numba import int64, njit, uint64
from numba.cpython.unsafe.numbers import trailing_zeros

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import bit_count, greatest, to_bits, to_integers
from mpicomp.kernels.cpu.simd import LANES, load, select, splat, store


@njit(nogil=True, inline="always")
def _lanes(x, residual, left, i, mask):
    """Return the magnitudes of 16 elements, and write the elements to `left`."""
    v = load(x, i)
    if residual is not None:
        v = v + load(residual, i)
    if left is not None:
        store(left, i, v)
    return to_integers(v) & splat(mask)


@njit(nogil=True, inline="always")
def _value(x, residual, i):
    v = x[i]
    if residual is not None:
        v = v + residual[i]
    return v


@njit(nogil=True, inline="always")
def _one(x, residual, left, i, mask):
    """Return the magnitude of one element, as uint64, and write the element to `left`."""
    v = _value(x, residual, i)
    if left is not None:
        left[i] = v
    return uint64(to_integers(v)) & uint64(mask)


@kernel
def largest(x, residual, left, chunk, mask, indices, values):
    """Find the largest magnitude of each chunk; of equal ones the first.

    Parameters
    ----------
    x : float32[n] or float64[n]
    residual : like x, or None
        Added to x.
    left : like x, or None
        Overwritten with x + residual; in memory of its own.
    chunk : int
        Elements; the last one may be short.
    mask : uint32 or uint64, as wide as x's elements
        All bits but the sign.
    indices : uint32[ceil(n / chunk)]
        Overwritten with places within the chunks.
    values : float array, as long
        Overwritten with the elements there.

    Returns
    -------
    uint64
        The largest of all magnitudes.
    """
    most = uint64(0)
    for q in range(indices.size):
        start = q * chunk
        stop = min(x.size, start + chunk)
        at = start
        if stop - start >= LANES:
            last = stop - LANES  # the last vector begins here, be it that it overlaps the one before
            top = _lanes(x, residual, left, start, mask)
            i = start + LANES
            while i < stop:
                lanes = _lanes(x, residual, left, min(i, last), mask)
                top = select(lanes > top, lanes, top)
                i += LANES
            size = greatest(top)
            hits = to_bits(_lanes(x, residual, None, at, mask) == splat(size))
            while hits == 0 and at < last:
                at = min(at + LANES, last)
                hits = to_bits(_lanes(x, residual, None, at, mask) == splat(size))
            if hits:
                at += int64(trailing_zeros(hits))
            most = max(most, uint64(size))
        else:
            best = _one(x, residual, left, start, mask)
            for j in range(start + 1, stop):
                other = _one(x, residual, left, j, mask)
                if other > best:
                    best, at = other, j
            most = max(most, best)
        indices[q] = at - start
        values[q] = _value(x, residual, at)
    return most


@njit(nogil=True)
def _group_maxima(x, residual, left, start, stop, depth, mask, maxima):
    """Compute the maxima of groups of `depth` elements, or fewer; return the number of groups."""
    whole = start + (stop - start) // LANES * LANES
    groups, i = 0, start
    while i < whole:
        end = min(whole, i + depth * LANES)
        top = _lanes(x, residual, left, i, mask)
        i += LANES
        while i < end:
            lanes = _lanes(x, residual, left, i, mask)
            top = select(lanes > top, lanes, top)
            i += LANES
        store(maxima, groups, top)
        groups += LANES
    while i < stop:  # elements that do not fill a vector: groups of one
        maxima[groups] = _one(x, residual, left, i, mask)
        groups += 1
        i += 1
    return groups


@njit(nogil=True)
def _threshold(sizes, n, k, high):
    """Return a number that exactly k of the first n sizes reach, or with ties the k-th largest.

    It is built bit by bit from `high` on. `sizes` has room for 15 more.
    """
    padded = (n + LANES - 1) // LANES * LANES
    for i in range(n, padded):
        sizes[i] = 0
    wanted = uint64(k)
    found, bit = uint64(0), high
    while bit:
        trial = found | bit
        least = splat(sizes.dtype.type(trial))
        reached = uint64(0)
        for i in range(0, padded, LANES):
            reached += bit_count(to_bits(load(sizes, i) >= least))
        found = trial if reached >= wanted else found
        if reached == wanted:
            break
        bit = bit >> uint64(1)
    return found


@njit(nogil=True)
def _candidates(x, residual, start, stop, bound, k, mask, places, sizes):
    """Collect the elements that reach `bound`, in order, the first k of those equal to it; return their number."""
    whole = start + (stop - start) // LANES * LANES
    found, equal = 0, 0
    least = bound
    limit = splat(sizes.dtype.type(least))
    i = start
    while i < stop:
        if i < whole:
            hits = to_bits(_lanes(x, residual, None, i, mask) >= limit)
        else:
            hits = (uint64(1) << uint64(stop - i)) - uint64(1)
        while hits:
            at = i + int64(trailing_zeros(hits))
            hits &= hits - uint64(1)
            size = _one(x, residual, None, at, mask)
            if size < least or found == places.size:
                continue
            if size == bound:
                equal += 1
                if equal == k:
                    least = bound + uint64(1)
                    limit = splat(sizes.dtype.type(least))
            places[found] = at - start
            sizes[found] = size
            found += 1
        i += LANES
    return found


@kernel
def several(x, residual, left, chunk, keep, depth, mask, high, maxima, places, sizes, indices, values):
    """Find the `keep` largest magnitudes of each chunk, in ascending order of place; of equal ones the first.

    Parameters
    ----------
    x, residual, left, chunk, mask, values
        As in `largest`.
    keep : int
        Elements kept of a whole chunk; ceil(keep m / chunk) of a short one of m elements.
    depth : int
        Elements of a group; chunk / depth should be more than `keep`.
    high : uint64
        The highest bit of a magnitude.
    maxima : uint32 or uint64, as wide as x's elements, [groups of a chunk + 31]
        Working memory.
    places : uint32[elements that may reach the bound]
        Working memory: keep (depth + 1), where there are that many elements.
    sizes : like maxima [that many + 15]
        Working memory.
    indices : uint32[all that are kept]
        Overwritten with places within the chunks.

    Returns
    -------
    uint64
        The largest of all magnitudes.
    """
    most = uint64(0)
    done = 0
    for start in range(0, x.size, chunk):
        stop = min(x.size, start + chunk)
        k = (keep * (stop - start) + chunk - 1) // chunk
        groups = _group_maxima(x, residual, left, start, stop, depth, mask, maxima)
        for g in range(groups):
            most = max(most, uint64(maxima[g]))
        bound = uint64(0)
        if groups >= k:
            bound = _threshold(maxima, groups, k, high)
        found = _candidates(x, residual, start, stop, bound, k, mask, places, sizes)
        threshold = _threshold(sizes, found, k, high)
        ties = k
        for j in range(found):
            ties -= sizes[j] > threshold
        at = done
        for j in range(found):
            if sizes[j] > threshold or (sizes[j] == threshold and ties > 0):
                ties -= sizes[j] == threshold
                indices[at] = places[j]
                values[at] = _value(x, residual, start + int64(places[j]))
                at += 1
        done += k
    return most
