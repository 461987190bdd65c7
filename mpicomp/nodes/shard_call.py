"""Calls of methods that are parts of a call of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from collectives.annotations import Array, FloatArray
from mpicomp.aggregator.call import CallText, VectorCall


def _of_outer(name: str) -> Any:
    """Return an attribute that a call within another one shares with it."""

    def read(call: ShardCall) -> Any:
        return getattr(call.outer, name)

    def write(call: ShardCall, value: object) -> None:
        setattr(call.outer, name, value)

    return property(read, write)


class ShardCall(VectorCall):
    """Call of a method between nodes, which is a part of another call and advances with it.

    Parameters
    ----------
    outer : VectorCall
    text : CallText
        Its `group` are the owners of the shard.
    values : FloatArray or None
        Sum of the node; None: `read` computes it.
    out : array
        Overwritten with the result.
    read : callable or None
        See `VectorCall`.
    """

    wait_name = _of_outer("wait_name")
    owners = _of_outer("owners")
    arrival = _of_outer("arrival")
    rest_meanwhile = _of_outer("rest_meanwhile")
    idle_turns = _of_outer("idle_turns")
    waited_s = _of_outer("waited_s")
    background = _of_outer("background")
    note = _of_outer("note")
    moved = _of_outer("moved")
    turn = _of_outer("turn")
    is_alone = _of_outer("is_alone")

    def __init__(
        self,
        outer: VectorCall,
        text: CallText,
        values: FloatArray | None,
        out: Array,
        read: Callable[[range], FloatArray] | None = None,
    ) -> None:
        self.outer = outer
        describe = outer.describe
        super().__init__(text, outer.step, outer.user, values, None, out, outer.traffic)
        self.read = read
        self.tag = text.tag
        outer.describe = describe
        self.thread = outer.thread
        if text.spec.is_narrow:
            self.wide = values
        self.accepts_packed = read is not None

    @property
    def describe(self) -> Callable[[], str]:
        """Description of the wait. Ranks have their numbers between nodes in it, so this rank's place comes first."""
        return self.outer.describe

    @describe.setter
    def describe(self, describe: Callable[[], str]) -> None:
        is_placed = isinstance(describe, partial) and describe.func is _placed
        self.outer.describe = describe if is_placed else partial(_placed, self.group.here, describe)


def _placed(here: str, describe: Callable[[], str]) -> str:
    text = describe()
    return text if text.startswith(here) else f"{here}: {text}"
