"""Tags, persistent requests and shared objects of a communicator's long-lived users, such as aggregators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar
from weakref import ref

from collectives.execution.pipelined import Cache, free_all

FIXED_TAGS = 16_000  # long-lived users have the tags below, and single calls as many from there on

_Kind = TypeVar("_Kind")


class Users:
    """The long-lived users of a communicator.

    Attributes
    ----------
    gone : list
        References of users that are gone, whose requests are yet to be freed.
    """

    def __init__(self) -> None:
        self._fixed_tag, self._rolling_tag = 0, 0
        self._common: dict[type[object], object] = {}
        self._held: dict[int, tuple[ref[object], Callable[[], None]]] = {}  # by the reference's identity
        self.gone: list[ref[object]] = []

    def fixed_tag(self) -> int:
        """Return a tag for one long-lived user of this communicator; all ranks take theirs in the same order."""
        self._fixed_tag = self._fixed_tag % (FIXED_TAGS - 1) + 1
        return self._fixed_tag

    @contextmanager
    def tags_unused(self) -> Iterator[None]:
        """Take back the tags of long-lived users that are made in this block, since they never communicate."""
        before = self._fixed_tag
        try:
            yield
        finally:
            self._fixed_tag = before

    @contextmanager
    def tags_unused_on_error(self) -> Iterator[None]:
        """Take back the tags of a long-lived user whose constructor fails in this block."""
        before = self._fixed_tag
        try:
            yield
        except BaseException:
            self._fixed_tag = before
            raise

    def next_tag(self) -> int:
        """Return a tag for one call; all ranks take theirs in the same order."""
        self._rolling_tag = (self._rolling_tag + 1) % FIXED_TAGS
        return FIXED_TAGS + self._rolling_tag

    def common(self, kind: type[_Kind]) -> _Kind:
        """Return the object of this class that all long-lived users of this communicator share on this rank."""
        found = self._common.setdefault(kind, kind())
        assert isinstance(found, kind)
        return found

    def persistent(self, owner: object) -> Cache:
        """Return a cache for a long-lived user's persistent requests, of one program on the same buffers."""
        cache: Cache = {}
        self.free_after(owner, partial(free_all, cache))
        return cache

    def free_after(self, owner: object, free: Callable[[], None]) -> None:
        """Free a long-lived user's persistent requests at the next call after it is gone, or when this is closed.

        A finalizer would not do: it may run in any thread, and at a time when MPI must not be called. Until then the
        requests' buffers stay, too.

        Parameters
        ----------
        owner : object
            The user; referred to weakly.
        free : callable
            Frees its requests, of which none is active when it is called; holds no reference to `owner`.
        """
        user = ref(owner, self.gone.append)
        self._held[id(user)] = user, free

    def free_unused(self) -> None:
        """Free the requests of users that are gone."""
        while self.gone:
            _, free = self._held.pop(id(self.gone.pop()))
            free()

    def free_all(self) -> None:
        """Free the requests of all users."""
        for _, free in self._held.values():
            free()
        self._held.clear()
