"""Feedback of one shard of a vector, and its states, which other shards can continue from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from collectives.annotations import AnyArray
from collectives.quoting import shown
from mpicomp.aggregator.parts import Feedback, State, StateKind, VectorSpec
from mpicomp.auto.chosen import KEY as PLAN
from mpicomp.feedback.base import BY_ELEMENT
from mpicomp.nodes.driver import PerNodeDriver
from mpicomp.nodes.shards import tensor_parts

SHARD = "shard"
"""Entry of a state with the bounds of the shards that it contains: two for a rank's own, more for merged states."""


class ShardFeedback:
    """Feedback of this rank's shard. States also have the shard's bounds.

    Parameters
    ----------
    inner : Feedback
        The method's.
    own : range
        This rank's shard.
    spec : VectorSpec
        Description of the whole vectors.
    driver : PerNodeDriver or None
        None: the method's own driver makes the steps.

    Attributes
    ----------
    own : range
        Elements of the shard.
    matrix_rows : sequence of int or None
        Rows of all tensors, which ranks compare, if the method distinguishes tensors by them.
    """

    def __init__(self, inner: Feedback, own: range, spec: VectorSpec, driver: PerNodeDriver | None) -> None:
        self._inner, self.own, self._driver = inner, own, driver
        self._parts_of = partial(tensor_parts, spec)
        shapes = spec.tensor_shapes or ()
        self.matrix_rows = [shape[0] for shape in shapes if shape] if inner.matrix_rows is not None else None
        self._bounds = np.array([own.start, own.stop], np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    @property
    def state_kinds(self) -> dict[str, StateKind]:
        """See `Feedback.state_kinds`."""
        return {**self._inner.state_kinds, SHARD: "shard"}

    def state(self) -> State:
        """See `Feedback.state`."""
        return {**self._inner.state(), SHARD: self._bounds.copy()}

    def like(self) -> State:
        """See `Feedback.like`."""
        return {**self._inner.like(), SHARD: self._bounds}

    def load(self, state: State) -> str:
        """See `Feedback.load`."""
        restored = self._inner.load({key: one for key, one in state.items() if key != SHARD})
        if self._driver is None:
            return restored
        self._driver.has_pending, self._driver.restored = True, restored
        return "scales of its own shard" if restored else ""

    def stand_in(self, state: State, elements: range) -> State:
        """Return a state of another shard, whose owners have died: like this one, but without pending errors.

        Numbers of tensors are those of the same tensors where both shards have parts of them, else the mean. Vectors
        that depend on the shard otherwise begin from scratch, as all do if the state is that of an empty shard: this
        rank's own one then begins, with the settings that all survivors have.
        """
        start, stop = np.asarray(state[SHARD]).tolist()[:: len(state[SHARD]) - 1]
        fresh, kinds = self._inner.state(), self._inner.state_kinds
        if start == stop:
            return {**state, **{key: one for key, one in self.state().items() if np.ndim(one) and key != PLAN}}
        parts, others = self._parts_of(range(start, stop)), self._parts_of(elements)
        made: State = {**state, SHARD: np.array([elements.start, elements.stop], np.int64)}
        for key, value in state.items():
            shape, kind = np.shape(value), kinds.get(key)
            if kind == "owned" and shape == (2,):
                made[key] = np.array([0, len(elements)])
            elif kind in BY_ELEMENT and shape == (stop - start,):
                made[key] = np.zeros(len(elements), value.dtype)
            elif kind == "shared" and shape == (len(parts),) and value.dtype.kind == "f" and key != PLAN:
                numbers = {tensor: one for (tensor, _), one in zip(parts, value, strict=True)}
                mean = value.mean() if value.size else 0
                made[key] = np.array([numbers.get(tensor, mean) for tensor, _ in others], value.dtype)
            elif kind == "shared" and shape and key != PLAN:
                made[key] = fresh[key]
        return made

    def localize(self, state: Any, where: str) -> Any:
        """Return this rank's part of a state that has all shards; other states are returned as they are.

        Entries with a number for each element are cut. Of those with a number for each tensor, the parts of a tensor
        in several old shards are averaged by their elements. Others stay as they are in this rank's aggregator where
        the old shards differ.

        Raises
        ------
        ValueError
            The state was taken by the owner of another shard, or its bounds are damaged.
        """
        bounds = _bounds_of(state, where)
        if bounds is None or tuple(bounds) == (self.own.start, self.own.stop):
            return state if bounds is None else {key: _single(one) for key, one in state.items()}
        if bounds[0] != 0 or bounds[-1] != state.get("n"):
            raise ValueError(
                f"{where}: this state is of elements {bounds[0]} to {bounds[-1] - 1}, and this rank owns "
                f"{self.own.start} to {self.own.stop - 1}: another number of nodes, or of ranks on each, took it; "
                "load what mpicomp.redistribute makes of the states of all ranks"
            )
        like = self._inner.like()
        return {key: self._cut(key, one, bounds, like) for key, one in state.items()}

    def _cut(self, key: str, value: Any, bounds: Sequence[int], like: State) -> Any:
        if key == SHARD:
            return self._bounds
        if key not in like:
            return value
        n, shape = bounds[-1], like[key].shape
        whole = np.asarray(value) if not isinstance(value, Mapping) else None
        if shape == (len(self.own),) and whole is not None and whole.shape == (n,):
            return whole[self.own.start : self.own.stop]
        if (
            self._inner.state_kinds.get(key) in BY_ELEMENT
            and shape == (len(self.own),)
            and (self.own or whole is not None)
        ):
            return value  # of another length, which the check reports
        by_shard = [*value.values()] if isinstance(value, Mapping) else [value]
        old = [range(start, stop) for start, stop in pairwise(bounds)]
        if self.own in old and len(by_shard) == len(old):
            return by_shard[old.index(self.own)]
        arrays = [np.asarray(one) for one in by_shard]
        parts, old_parts = self._parts_of(self.own), [self._parts_of(one) for one in old]
        if shape == (len(parts),) and [one.shape for one in arrays] == [(len(one),) for one in old_parts]:
            return _averaged(parts, old_parts, arrays)
        if all(one.shape == shape and np.array_equal(one, arrays[0], equal_nan=True) for one in arrays):
            return arrays[0]
        if not shape and all(not one.shape for one in arrays):
            return np.mean(arrays, dtype=np.float64)
        return self._inner.state()[key]


def _averaged(
    parts: Sequence[tuple[int, int]], old: Sequence[Sequence[tuple[int, int]]], by_shard: Sequence[Any]
) -> AnyArray:
    """Return the number of each tensor: the mean of those of its parts in the old shards, by elements."""
    totals: dict[int, float] = {}
    counts: dict[int, int] = {}
    for numbers, values in zip(old, by_shard, strict=True):
        for (tensor, count), value in zip(numbers, np.asarray(values).tolist(), strict=True):
            totals[tensor] = totals.get(tensor, 0.0) + count * value
            counts[tensor] = counts.get(tensor, 0) + count
    return np.array([totals[tensor] / counts[tensor] for tensor, _ in parts])


def _bounds_of(state: Any, where: str) -> list[int] | None:
    """Return the bounds of the shards in a state; None if it has none, which a later check reports."""
    if not isinstance(state, Mapping) or SHARD not in state:
        return None
    found = np.asarray(state[SHARD])
    bounds = found.tolist() if found.dtype.kind in "iu" and found.ndim == 1 else []
    if len(bounds) < 2 or sorted(bounds) != bounds:
        raise ValueError(f"{where}: this state's {SHARD} is {shown(state[SHARD])}, not bounds: take an earlier one")
    return bounds


def _single(value: Any) -> Any:
    """Return the entry of the only shard."""
    return next(iter(value.values())) if isinstance(value, Mapping) and len(value) == 1 else value
