"""States of stores of messages, and the number of a pair of stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from collectives.quoting import listed, shown
from mpicomp.pipeline.store_rows import Stamps

State: TypeAlias = dict[str, Any]
_CONTINUATION_BITS = 32  # of a pair's number


def check(state: Mapping[str, Any], mine: State, rows: int, arrays: tuple[str, ...]) -> Stamps:
    """Return the stamps of a state of a store with the properties `mine`; ValueError if it is not one of these."""
    if not isinstance(state, Mapping) or set(state) - {"pair"} != {*mine, *arrays}:  # older states have no pair
        held = listed(state) if isinstance(state, Mapping) else shown(state)
        raise ValueError(f"a state with {held} is not one of this store, which has {listed([*mine, *arrays])}")
    for name, value in mine.items():
        found = list(state[name]) if isinstance(state[name], tuple) else state[name]
        if found != value or type(found) is not type(value):
            raise ValueError(
                f"the state is of a store whose {name} is {shown(state[name])}, and this one's is {shown(value)}: "
                "load the state that belongs to it, or make the store like that"
            )
    marks = np.asarray(state["stamps"])
    if marks.dtype == np.int32:  # of a state with tensors
        marks = marks.view(np.uint32)
    if marks.dtype != np.uint32 or marks.shape != (rows,):
        raise ValueError(
            f"the state's stamps are {marks.dtype} of shape {marks.shape}, not uint32 of {rows} rows: it is "
            "damaged, load an earlier one"
        )
    return marks


def next_pair(pair: int, random_number: int) -> int:
    """Return the number of a pair of stores that goes on: of the same run, but of another continuation."""
    changed = (pair ^ random_number) % 2**_CONTINUATION_BITS if pair else pair ^ random_number
    return pair ^ changed


def is_of_another_run(pair: int, other: int) -> bool:
    """Return True if two stores' numbers are those of different runs."""
    return bool((pair ^ other) >> _CONTINUATION_BITS)
