"""Low-rank factors: products of matrices with a few rows, and orthonormal rows.

Matrices are flat, row after row. Factors are arrays [rank, n]: each of their rows is a vector. Every sum has one order
on every machine and for any part of a matrix: an inner product adds up 16 lanes, folds them, and adds the
elements behind the last 16; a product with a transposed matrix adds its rows one after the other.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float64, njit

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import fold, from_bits, greatest, to_integers, widen
from mpicomp.kernels.cpu.simd import LANES, absolute, load, select, splat, store

TILE = 512  # columns; the factor's part for them and four rows of the matrix stay in the first-level cache
_MOST_DOUBLINGS = 1000  # 2^1000 and 2^-1000 are normal numbers of float64


@njit(nogil=True, inline="always")
def _larger(largest, vector):
    """Return the larger of the lanes' bits so far and the bits of |vector|; NaN is larger than infinity."""
    bits = to_integers(absolute(vector))
    return select(bits > largest, bits, largest)


# Products -----------------------------------------------------------------------------------------------------------


@njit(nogil=True)
def _project_rows(sums, i, q, first, p):
    """Write the products of four rows, from row i on, with all rows of q."""
    cols = q.shape[1]
    whole = cols // LANES * LANES
    a, b, c, d = i * cols, (i + 1) * cols, (i + 2) * cols, (i + 3) * cols
    for k in range(q.shape[0]):
        at = k * cols
        w = x = y = z = splat(sums.dtype.type(0))
        for j in range(0, whole, LANES):
            factor = load(q, at + j)
            w = w + load(sums, a + j) * factor
            x = x + load(sums, b + j) * factor
            y = y + load(sums, c + j) * factor
            z = z + load(sums, d + j) * factor
        one, two, three, four = fold(w), fold(x), fold(y), fold(z)
        for j in range(whole, cols):
            one += sums[a + j] * q[k, j]
            two += sums[b + j] * q[k, j]
            three += sums[c + j] * q[k, j]
            four += sums[d + j] * q[k, j]
        p[k, first + i], p[k, first + i + 1], p[k, first + i + 2], p[k, first + i + 3] = one, two, three, four


@njit(nogil=True)
def _project_row(sums, i, q, first, p):
    cols = q.shape[1]
    whole = cols // LANES * LANES
    for k in range(q.shape[0]):
        lanes = splat(sums.dtype.type(0))
        for j in range(0, whole, LANES):
            lanes = lanes + load(sums, i * cols + j) * load(q, k * cols + j)
        total = fold(lanes)
        for j in range(whole, cols):
            total += sums[i * cols + j] * q[k, j]
        p[k, first + i] = total


@kernel
def project(values, residual, q, first, sums, p):
    """Compute sums = values + residual, and p = q sums^T for these rows.

    values, residual : float32[rows * cols] or float64[rows * cols], some rows of a matrix. q : like them,
    [rank, cols]; the rank may be 0. sums : like values, overwritten. p : like them, [rank, all rows]; overwritten from
    row `first` on.

    Returns
    -------
    float
        The largest magnitude of the sums; NaN if they hold one.
    """
    cols = q.shape[1]
    rows = values.size // cols
    whole = values.size // LANES * LANES
    largest = to_integers(splat(values.dtype.type(0)))
    rest = to_integers(values.dtype.type(0))
    done = 0  # elements whose sums are there
    for i in range(0, rows, 4):
        stop = min(i + 4, rows) * cols
        while done < min(stop, whole):
            total = load(values, done) + load(residual, done)
            largest = _larger(largest, total)
            store(sums, done, total)
            done += LANES
        while whole <= done < stop:
            one = values[done] + residual[done]
            rest = max(rest, to_integers(abs(one)))
            sums[done] = one
            done += 1
        if i + 4 <= rows:
            _project_rows(sums, i, q, first, p)
        else:
            for one_row in range(i, rows):
                _project_row(sums, one_row, q, first, p)
    return from_bits(max(greatest(largest), rest), values[0])


@kernel
def project_back(sums, p, start, stop, q):
    """Compute q = p sums for the columns from `start` to `stop`.

    sums : float32[rows * cols] or float64[rows * cols]. p : like them, [rank, rows]. q : like them, [rank, cols],
    overwritten in these columns.
    """
    rank, rows = p.shape
    cols = q.shape[1]
    fours = rows // 4 * 4
    for tile in range(start, stop, TILE):
        end = min(tile + TILE, stop)
        whole = tile + (end - tile) // LANES * LANES
        for k in range(rank):
            for j in range(tile, end):
                q[k, j] = 0
        for i in range(0, fours, 4):  # four rows at a time: the factor's part is loaded and stored a quarter as often
            at = i * cols
            for k in range(rank):
                a, b, c, d = splat(p[k, i]), splat(p[k, i + 1]), splat(p[k, i + 2]), splat(p[k, i + 3])
                for j in range(tile, whole, LANES):
                    total = load(q, k * cols + j) + load(sums, at + j) * a
                    total = total + load(sums, at + cols + j) * b
                    total = total + load(sums, at + 2 * cols + j) * c
                    total = total + load(sums, at + 3 * cols + j) * d
                    store(q, k * cols + j, total)
        for k in range(rank):
            for i in range(fours, rows):
                factor = splat(p[k, i])
                for j in range(tile, whole, LANES):
                    store(q, k * cols + j, load(q, k * cols + j) + load(sums, i * cols + j) * factor)
            for i in range(rows):
                for j in range(whole, end):
                    q[k, j] += sums[i * cols + j] * p[k, i]


@kernel
def expand(p, first, q, sums, out):
    """Compute out = p^T q for some rows, from row `first` on, and subtract it from `sums`.

    p : float32[rank, all rows] or float64[rank, all rows]. q : like it, [rank, cols]. sums : like it, [rows * cols],
    overwritten; or None. out : like it, [rows * cols], overwritten.

    Returns
    -------
    float
        The largest magnitude of `out`; NaN if it holds one.
    """
    rank, cols = q.shape
    whole = cols // LANES * LANES
    largest = to_integers(splat(out.dtype.type(0)))
    rest = to_integers(out.dtype.type(0))
    for i in range(out.size // cols):
        at = i * cols
        for j in range(0, whole, LANES):
            total = splat(p[0, first + i]) * load(q, j)
            for k in range(1, rank):
                total = total + splat(p[k, first + i]) * load(q, k * cols + j)
            largest = _larger(largest, total)
            store(out, at + j, total)
            if sums is not None:
                store(sums, at + j, load(sums, at + j) - total)
        for j in range(whole, cols):
            one = p[0, first + i] * q[0, j]
            for k in range(1, rank):
                one += p[k, first + i] * q[k, j]
            rest = max(rest, to_integers(abs(one)))
            out[at + j] = one
            if sums is not None:
                sums[at + j] -= one
    return from_bits(max(greatest(largest), rest), out[0])


# Orthonormal rows ---------------------------------------------------------------------------------------------------


@njit(nogil=True)
def _dot(rows, k, m):
    """Return the inner product of two rows, summed in float64."""
    n = rows.shape[1]
    whole = n // LANES * LANES
    lanes = splat(float64(0))
    for j in range(0, whole, LANES):
        lanes = lanes + widen(load(rows, k * n + j)) * widen(load(rows, m * n + j))
    total = fold(lanes)
    for j in range(whole, n):
        total += float64(rows[k, j]) * float64(rows[m, j])
    return total


@njit(nogil=True)
def _scale(rows, k, factor):
    for j in range(rows.shape[1]):
        rows[k, j] = rows.dtype.type(float64(rows[k, j]) * factor)


@kernel
def orthonormalize(rows, epsilon):
    """Make the rows orthonormal, in place, by Gram-Schmidt; return how many depend on earlier rows.

    Each row is first multiplied by a power of two, so that squares neither overflow nor vanish, and the earlier rows
    are subtracted twice: once is not enough where little is left of a row. A row of which at most `epsilon` is left
    becomes zeros. NaN and infinity end as NaN.

    rows : float32[rank, n] or float64[rank, n]. epsilon : float64.
    """
    rank, n = rows.shape
    dependent = 0
    for k in range(rank):
        largest = float64(0)
        for j in range(n):
            largest = max(largest, abs(float64(rows[k, j])))
        _, exponent = math.frexp(largest)
        _scale(rows, k, math.ldexp(1.0, max(-_MOST_DOUBLINGS, min(_MOST_DOUBLINGS, -exponent))))
        before = np.sqrt(_dot(rows, k, k))
        for _ in range(2):
            for m in range(k):
                part = _dot(rows, m, k)
                for j in range(n):
                    rows[k, j] = rows.dtype.type(float64(rows[k, j]) - part * float64(rows[m, j]))
            left = np.sqrt(_dot(rows, k, k))
            if left <= epsilon * before and before < np.inf:
                dependent += 1
                for j in range(n):
                    rows[k, j] = 0
                break
            _scale(rows, k, 1 / left)
            before = 1.0
    return dependent
