"""Saving, checking and loading the state of one rank, for every owner of residuals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from collectives import Communicator
from collectives.consistency.descriptions import fingerprint
from collectives.quoting import shown
from mpicomp.aggregator.base import Aggregator
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.state.schema import STATE_KEY, State, StateSchema, with_arrays, with_tensors, wrapped_part


class StateOwner(ABC):
    """Base of objects whose counters, tensors and aggregators are saved on each rank."""

    state_schema: ClassVar[StateSchema]
    """Declared entries of the states."""
    loads: ClassVar[str]
    """Purpose of `load_state_dict`, for the messages of ranks that wait for it."""
    comm: Communicator

    @property
    @abstractmethod
    def aggregators(self) -> Sequence[Aggregator]:
        """One aggregator per bucket."""

    @property
    def saved_aggregators(self) -> Sequence[Aggregator]:
        """Aggregators whose states are part of a state."""
        return self.aggregators

    @abstractmethod
    def own_entries(self) -> State:
        """Return the entries of a state besides the aggregators'; tensors are copied."""

    @abstractmethod
    def check_own(self, own: State) -> None:
        """Raise ValueError unless entries, which have their declared types, can be loaded, and the aggregators' too."""

    @abstractmethod
    def restored_point(self, own: State) -> str:
        """Return, in words, the point in training that the entries belong to; ranks compare it."""

    @abstractmethod
    def load_own(self, own: State) -> None:
        """Load entries that have been checked; the aggregators' states are loaded afterwards."""

    def wrapped_state(self) -> State:
        """Return the wrapped optimizer's state; empty where none is wrapped."""
        return {}

    def load_wrapped(self, state: State) -> None:
        """Load a state of the wrapped optimizer, or leave it as it was and raise ValueError."""
        return

    @in_own_mode
    def state_dict(self) -> State:
        """Return this rank's residuals and counters under "mpicomp", next to the wrapped optimizer's own state.

        It has tensors, numbers and texts alone. :func:`mpicomp.torch.redistribute_states` makes those for another
        number of ranks.

        Returns
        -------
        dict
            For ``torch.save``, one file per rank.
        """
        aggregators = self.saved_aggregators
        own = {
            **self.own_entries(),
            "rank": self.comm.rank,
            "ranks": self.comm.size,
            "aggregators": [with_tensors(one.state_dict()) for one in aggregators],
            "kinds": [one.state_kinds for one in aggregators],
        }
        return {**self.wrapped_state(), STATE_KEY: own}

    @in_own_mode
    def check_state_dict(self, state: State) -> None:
        """Check a state that is not to be loaded yet; not collective.

        Parameters
        ----------
        state : dict
            As from :meth:`state_dict`.

        Raises
        ------
        ValueError
            As `load_state_dict` would on this rank.
        """
        self._checked(state)

    def _checked(self, state: object) -> State:
        """Return the entries under "mpicomp"."""
        own = self.state_schema.own_part(state)
        if (own["rank"], own["ranks"]) != (self.comm.rank, self.comm.size):
            raise ValueError(
                f"the state is that of rank {shown(own['rank'])} of {shown(own['ranks'])}; every rank loads its own, "
                "and mpicomp.torch.redistribute_states makes those for another number of ranks"
            )
        self.check_own(own)
        return own

    @in_own_mode
    def load_state_dict(self, state: State) -> None:
        """Load a copy of a state of :meth:`state_dict`, on the same rank of as many ranks; collective.

        Training goes on from it to the bit, also in a new process.

        Parameters
        ----------
        state : dict
            This rank's; not changed.

        Raises
        ------
        ValueError
            The state is of another class, of other options or of another model, or it is damaged. Nothing is changed
            then, on any rank; the other ranks raise CollectiveMismatch.
        CollectiveMismatch
            Another rank raised ValueError, or the ranks' states are of different points in training.
        """
        comm, before = self.comm, self.wrapped_state()
        with comm.refusing(self.loads, ValueError, where=comm.here):
            own = self._checked(state)
            self.load_wrapped(wrapped_part(state))
        point, buckets = f"{self.loads} {self.restored_point(own)}", own.get("buckets")
        listed = "" if buckets is None else f" in {len(buckets)} buckets"
        try:
            comm.agree(fingerprint(f"{point} in {buckets}"), lambda: f"{point}{listed}")
        except BaseException:
            self.load_wrapped(before)
            raise
        self.load_own(own)
        for aggregator, one in zip(self.saved_aggregators, own["aggregators"], strict=True):
            aggregator.load_state_dict(with_arrays(one))


def require_aggregators(own: State, aggregators: Sequence[Aggregator]) -> None:
    """Raise ValueError unless these aggregators can load those of a state."""
    if len(own["aggregators"]) != len(aggregators):
        raise ValueError("the state has another number of buckets than of aggregators; load an earlier one")
    for aggregator, one in zip(aggregators, own["aggregators"], strict=True):
        aggregator.check_state_dict(with_arrays(one))
