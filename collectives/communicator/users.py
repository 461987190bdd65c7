"""Tags, persistent requests and shared objects of a communicator's long-lived users, such as aggregators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        self._fixed_tag = 0
        self._common: dict[type[object], object] = {}
        self._requests: dict[int, tuple[ref[object], Cache]] = {}  # by the identity of the reference to their user
        self.gone: list[ref[object]] = []

    def fixed_tag(self) -> int:
        """Return the next tag of long-lived users."""
        self._fixed_tag = self._fixed_tag % (FIXED_TAGS - 1) + 1
        return self._fixed_tag

    @contextmanager
    def tags_unused(self) -> Iterator[None]:
        """Take back the tags of users that are made in this block."""
        before = self._fixed_tag
        try:
            yield
        finally:
            self._fixed_tag = before

    @contextmanager
    def tags_unused_on_error(self) -> Iterator[None]:
        """Take back the tags of a user whose constructor fails in this block."""
        before = self._fixed_tag
        try:
            yield
        except BaseException:
            self._fixed_tag = before
            raise

    def common(self, kind: type[_Kind]) -> _Kind:
        """Return the one object of this class that all users share."""
        found = self._common.setdefault(kind, kind())
        assert isinstance(found, kind)
        return found

    def persistent(self, owner: object) -> Cache:
        """Return a cache for a user's persistent requests; they are freed by `free_unused` after the user is gone."""
        # A finalizer would not do: it may run in any thread, and at a time when MPI must not be called. Until
        # `free_unused` the requests' buffers stay, too.
        user, cache = ref(owner, self.gone.append), Cache()
        self._requests[id(user)] = user, cache
        return cache

    def free_unused(self) -> None:
        """Free the requests of users that are gone."""
        while self.gone:
            _, cache = self._requests.pop(id(self.gone.pop()))
            free_all(cache)

    def free_all(self) -> None:
        """Free the requests of all users."""
        for _, cache in self._requests.values():
            free_all(cache)
        self._requests.clear()
