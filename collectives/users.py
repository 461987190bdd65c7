"""What long-lived users of a communicator, such as aggregators, get from it: tags, requests, objects in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar
from weakref import ref

from collectives.execution.pipelined import Cache, free_all

FIXED_TAGS = 16_000  # tags below are of long-lived users, and as many more from there on of single calls

_Kind = TypeVar("_Kind")


class Users:
    """The long-lived users of a communicator."""

    def __init__(self) -> None:
        self._fixed_tag, self._rolling_tag = 0, 0
        self._common: dict[type[object], object] = {}
        self._held: dict[int, tuple[ref[object], Callable[[], None]]] = {}  # by the reference's identity
        self._gone: list[ref[object]] = []

    def fixed_tag(self) -> int:
        """A tag for one long-lived user of this communicator; all ranks ask in the same order."""
        self._fixed_tag = self._fixed_tag % (FIXED_TAGS - 1) + 1
        return self._fixed_tag

    @contextmanager
    def tags_unused(self) -> Iterator[None]:
        """Long-lived users made in this block never communicate: their tags are given out again."""
        before = self._fixed_tag
        try:
            yield
        finally:
            self._fixed_tag = before

    @contextmanager
    def tags_unused_on_error(self) -> Iterator[None]:
        """If a long-lived user cannot be made in this block, its tags are given out again."""
        before = self._fixed_tag
        try:
            yield
        except BaseException:
            self._fixed_tag = before
            raise

    def next_tag(self) -> int:
        """A tag for one call; all ranks ask in the same order."""
        self._rolling_tag = (self._rolling_tag + 1) % FIXED_TAGS
        return FIXED_TAGS + self._rolling_tag

    def common(self, kind: type[_Kind]) -> _Kind:
        """The object of this kind that all long-lived users of this communicator share on this rank."""
        found = self._common.setdefault(kind, kind())
        assert isinstance(found, kind)
        return found

    def persistent(self, owner: object) -> Cache:
        """Where a long-lived user keeps the persistent requests of one program on the same buffers."""
        cache: Cache = {}
        self.free_after(owner, partial(free_all, cache))
        return cache

    def free_after(self, owner: object, free: Callable[[], None]) -> None:
        """Have a long-lived user's persistent requests freed when it is gone, at the next call, or when this is closed.

        Not by a finalizer, which may run in any thread, and at a time when MPI is not to be called. Until then the
        requests' buffers stay, too.

        Parameters
        ----------
        owner : object
            The user; referred to weakly.
        free : callable
            Frees its requests, of which none is active when it is called; holds no reference to `owner`.
        """
        user = ref(owner, self._gone.append)
        self._held[id(user)] = user, free

    def _free_unused(self) -> None:
        while self._gone:
            _, free = self._held.pop(id(self._gone.pop()))
            free()

    def _free_held(self) -> None:
        for _, free in self._held.values():
            free()
        self._held.clear()
