"""Long-lived users of a communicator, such as aggregators, that go on with the ranks that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary


class Survivor(Protocol):
    """Long-lived user of a communicator that goes on with the ranks that are left, such as an aggregator."""

    def save(self) -> Any:
        """Return all that the next step depends on; called once the calls in flight have been rolled back."""
        ...

    def describe(self) -> str:
        """Return its kind, options and tag, which are equal on all ranks."""
        ...

    def enter(self, peers: Any) -> Any:
        """Return the state from which a newcomer goes on, of a peer's `save`."""
        ...

    def restart(self, saved: Any) -> None:
        """Begin with the ranks as they are now, before any step: others have yet to make theirs; not collective."""
        ...

    def renew(self, saved: Any, survivors: tuple[int, ...]) -> Mapping[int, int | None]:
        """Continue from `save` on the communicator as it is now, whose ranks were `survivors` before; collective.

        Returns
        -------
        dict
            Age in steps of each dead rank's residual that a survivor has taken over, None for a lost one; empty: there
            are no copies of residuals.
        """
        ...


class SavedUser(NamedTuple):
    """Long-lived user with its state."""

    place: int  # in the order of joining
    name: str  # of `Survivor.describe`
    user: Survivor
    state: Any


class Survivors:
    """Long-lived users of one communicator.

    Attributes
    ----------
    n_joined : int
        Number of users that this rank has made.
    """

    def __init__(self) -> None:
        self.n_joined = 0
        # with their places in the order of joining, and the functions that return views of them
        self._users: WeakKeyDictionary[Any, tuple[int, Callable[[Any], Survivor]]] = WeakKeyDictionary()

    def join(self, user: Any, view: Callable[[Any], Survivor]) -> None:
        """Include a user, by a view of it. Ranks make theirs in one order."""
        self.n_joined += 1
        self._users[user] = self.n_joined, view

    def named(self) -> list[tuple[str, int, Survivor]]:
        """Return the users with their names and places, in the order of joining.

        Of users with equal descriptions a rank may keep more than others: their names count from the last one.
        """
        joined = sorted(((place, view(user)) for user, (place, view) in self._users.items()), key=itemgetter(0))
        found, seen = [], Counter[str]()
        for place, one in reversed(joined):
            name = one.describe()
            found.append((f"{name}, {seen[name]} of its kind later" if seen[name] else name, place, one))
            seen[name] += 1
        return found[::-1]

    def save(self) -> list[SavedUser]:
        """Return the users in the order of joining, with their states."""
        return save_all(self.named())


def save_all(users: Iterable[tuple[str, int, Survivor]]) -> list[SavedUser]:
    """Save the state of each user; a user comes with its name and place."""
    return [SavedUser(place, name, user, user.save()) for name, place, user in users]


def renew_all(
    saved: Iterable[SavedUser], common: Collection[str], n_joined: int, survivors: tuple[int, ...]
) -> list[Mapping[int, int | None]]:
    """Let the saved users continue on the communicator as it is now; collective. Returns the ages of residuals.

    `common` has the names of users that all ranks have, and `n_joined` how many all ranks have made. One that a rank
    has yet to make restarts: no step of it has ended. One that a rank has dropped, and another one keeps alive, is left
    as it is: no more calls of it can be made.
    """
    ages = []
    for one in saved:
        if one.name in common:
            ages.append(one.user.renew(one.state, survivors))
        elif one.place > n_joined:
            one.user.restart(one.state)
    return ages


def names_in_all(everyones: Iterable[Collection[str]]) -> set[str]:
    """Return the names that all ranks have."""
    return set.intersection(*map(set, everyones))


def describe_residuals(ages: Iterable[Mapping[int, int | None]], before: Sequence[int], size: int) -> str:
    """Return the fate of the residuals of dead ranks, for the warning; `before` has their first numbers."""
    oldest: dict[int, int | None] = {}
    for one in ages:
        for rank, age in one.items():
            known = oldest.get(rank, 0)
            oldest[rank] = None if age is None or known is None else max(age, known)
    if not oldest:
        return f"without {len(before) - size}/{len(before)} of what each residual had pending"
    kept = {before[rank]: age for rank, age in sorted(oldest.items())}
    return ", ".join(_describe_residual(rank, age) for rank, age in kept.items())


def _describe_residual(rank: int, age: int | None) -> str:
    if age is None:
        return f"without the residual of rank {rank}"
    return f"with the residual of rank {rank}" + (f" of {age} step{'s'[: age != 1]} before" if age else "")
