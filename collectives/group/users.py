"""Long-lived users of a communicator, such as aggregators: their tags, requests and shared objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import ref

from collectives.execution.requests import Cache, free_all, free_inactive
from collectives.progress.polling import keep_alive
from collectives.tags import OF_LONG_LIVED_USERS

_Kind = TypeVar("_Kind")


class Users:
    """The long-lived users of a communicator."""

    def __init__(self) -> None:
        self.last_tag = 0  # the last one given out; 0 before the first
        self._common: dict[type[object], object] = {}
        self._requests: dict[int, tuple[ref[object], Cache]] = {}  # by the identity of the reference to their user
        self.gone: list[ref[object]] = []  # to users that are gone, whose requests are yet to be freed

    def fixed_tag(self) -> int:
        """Return the next tag of long-lived users."""
        self.last_tag = self.last_tag % len(OF_LONG_LIVED_USERS) + OF_LONG_LIVED_USERS.start
        return self.last_tag

    @contextmanager
    def tags_unused(self, unless_made: bool = False) -> Iterator[None]:
        """Take back the tags of users that are made in this block; `unless_made`: only if it fails."""
        before = self.last_tag
        try:
            yield
            before = self.last_tag if unless_made else before
        finally:
            self.last_tag = before

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
            _, cache = self._requests.pop(id(self.gone.pop()), (None, {}))  # nothing of a user from before `renew`
            free_all(cache)

    def renew(self) -> None:
        """Forget objects and requests of a group of ranks that is no more; free those that MPI does not use."""
        for _, cache in self._requests.values():
            free_inactive(cache)
            if cache:
                keep_alive(cache)  # MPI may still write there
        keep_alive(self._common)
        self._requests, self._common = {}, {}

    @contextmanager
    def tags_from(self, tag: int) -> Iterator[None]:
        """Give out the tags behind this one once more in this block, to the user that had them."""
        before, self.last_tag = self.last_tag, tag
        try:
            yield
        finally:
            self.last_tag = before

    def free_all(self) -> None:
        """Free the requests of all users."""
        for _, cache in self._requests.values():
            free_all(cache)
        self._requests.clear()
