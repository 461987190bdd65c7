"""What a rank's DistributedOptimizer saves and restores.

A state is the wrapped optimizer's own, and under "mpicomp" what belongs to the rank:

====================  ================================================================
mode, rank, ranks     by which a state is recognized
rounds                counters, masters, and after local steps the common model
buckets               the names of each bucket's parameters
aggregators, kinds    of each bucket: a state, and what becomes of it on other ranks
====================  ================================================================
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from collectives import Communicator
from collectives.consistency.call_check import fingerprint
from collectives.quoting import one_line, shown
from mpicomp.torch.optimizer.synchronizer import Synchronizer
from mpicomp.torch.state.schema import (
    STATE_KEY,
    load_aggregators,
    own_part,
    rank_part,
    require_aggregators,
    require_rank,
    wrapped_part,
)


class RankState:
    """Takes states of an optimizer and its synchronizer, checks them and loads them.

    Parameters
    ----------
    optimizer
        The wrapped one.
    synchronizer
        Has the aggregators, and counters of its own.
    mode
        "gradients" or "updates".
    comm
        The communicator.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        synchronizer: Synchronizer,
        mode: str,
        comm: Communicator,
    ) -> None:
        self._optimizer, self._synchronizer = optimizer, synchronizer
        self._mode, self._comm = mode, comm

    def take(self) -> dict[str, Any]:
        """The state of now, of tensors and numbers; what is ours is copied."""
        reducers = self._synchronizer.reducers
        own = {
            "mode": self._mode,
            "rounds": self._synchronizer.state_dict(),
            "buckets": reducers.names,
            **rank_part(self._comm, [reducer.aggregator for reducer in reducers]),
        }
        return {**self._optimizer.state_dict(), STATE_KEY: own}

    def check(self, state_dict: Any) -> dict[str, Any]:
        """Return our part of a state; raise ValueError unless all of it can be loaded."""
        own = own_part(state_dict, mode=str, rounds=dict, buckets=list)
        require_rank(own, self._comm)
        if own["mode"] != self._mode:
            raise ValueError(
                f"the state is for synchronize={shown(own['mode'])}, but this optimizer has {self._mode!r}; build it "
                "with the same options"
            )
        with self._synchronizer.reducers.trial(own["buckets"]) as reducers:
            require_aggregators(own, [reducer.aggregator for reducer in reducers])
        self._synchronizer.check_state_dict(own["rounds"])
        return own

    def load(self, state_dict: Any) -> None:
        """Load a copy of a state on all ranks, or on none; collective."""
        before = self._optimizer.state_dict()
        try:
            own = self.check(state_dict)
            self._load_wrapped(wrapped_part(state_dict), before)
        except ValueError as error:
            self._comm.reject(ValueError(f"{self._comm.here}: {error}"), "restoring an optimizer")
        buckets = own["buckets"]
        when = f"restoring an optimizer after {own['rounds']['rounds']} synchronizations"
        try:
            self._comm.agree(fingerprint(f"{when} in {buckets}"), lambda: f"{when} in {len(buckets)} buckets")
        except BaseException:
            self._optimizer.load_state_dict(before)
            raise
        synchronizer = self._synchronizer
        synchronizer.reducers.restore(buckets)
        load_aggregators(own, [reducer.aggregator for reducer in synchronizer.reducers])
        synchronizer.load_state_dict(own["rounds"])
        # Between two synchronizations the ranks' models rightly differ.
        synchronizer.models_compared = synchronizer.models_differ

    def _load_wrapped(self, state: dict[str, Any], before: dict[str, Any]) -> None:
        """Load the wrapped optimizer's own state, or leave it as it was and raise ValueError."""
        try:
            # a copy, since torch takes over the tensors themselves, which redistributed states share
            self._optimizer.load_state_dict(copy.deepcopy(state))
        except Exception as error:  # torch checks little, and other optimizers have rules of their own
            self._optimizer.load_state_dict(before)
            raise ValueError(
                f"{type(self._optimizer).__name__} cannot load its part of the state ({type(error).__name__}: "
                f"{one_line(error)}); build it with the same options, or load an earlier state"
            ) from error
