"""Rows of all ranks, one rank's below the other's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from collectives.arrays.vectors import Flat, empty_like, flat
from collectives.dense import variable_size
from collectives.execution.handle import Call, Steps
from collectives.execution.staged import deliver


def all_gather_rows(call: Call, check: Steps, x: Any, rows: Flat) -> Steps:
    """Give the call the array of all ranks' rows as its result; the ranks may have different numbers of them.

    Parameters
    ----------
    call : Call
    check : iterator of bool
        Steps by which the ranks agree on element type and shape of a row.
    x : array[rows, ...]
        What the result is to be like.
    rows : Flat
        The vector of `x`.
    """
    yield from check
    count, *row_shape = rows.shape
    counts = yield from variable_size.all_gather_size(call, count)
    result = empty_like(x, (int(counts.sum()), *row_shape))
    target = flat(result, (rows.dtype,))
    landing = target.values
    sizes = counts * (math.prod(row_shape) * landing.itemsize)
    yield from variable_size.all_gather(call, rows.values.view(np.uint8), sizes, landing.view(np.uint8))
    if target.staging is not None:
        yield from deliver(call, target.staging)
    call.result = result
