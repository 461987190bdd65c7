"""Count the cost of communication in a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from apps.train.agreement import gather_rows
from collectives import Communicator
from mpicomp.algorithms import Aggregator
from mpicomp.cli.trace import length, union


@dataclass
class Meter:
    """Totals of one rank since the start of the run, those before a resume included."""

    rounds: int = 0  # synchronizations
    vectors_moved: float = 0.0  # that an all-reduce of as many numbers would have sent, on the mean rank
    bytes_sent: int = 0
    messages: int = 0
    seconds_communicating: float = 0.0  # in which calls were under way, once backward had ended
    seconds_training: float = 0.0  # of the steps alone, without loading, evaluation and checkpoints
    round_seconds: list[float] = field(default_factory=list)  # of every synchronization since this process started

    def count(self, aggregators: Sequence[Aggregator], since: float = 0.0) -> None:
        """Add the last synchronization of all buckets; calls may overlap, and have been begun before `since`."""
        calls = [aggregator.traffic.last for aggregator in aggregators]
        seconds = length(union([(max(call.started, since), call.ended) for call in calls]))
        ranks = aggregators[0].comm.size
        self.rounds += 1
        self.vectors_moved += 2 * (ranks - 1) / ranks
        self.bytes_sent += sum(call.bytes_sent for call in calls)
        self.messages += sum(call.messages for call in calls)
        self.seconds_communicating += seconds
        self.round_seconds.append(seconds)

    def summary(self, comm: Communicator, n_parameters: int) -> dict[str, Any]:
        """Totals for the record; collective.

        Bytes and messages are the mean over ranks, seconds those of the slowest rank. ``bits_per_element`` counts per
        phase: an all-reduce that sends b bits per element in its reduce and in its gather phase moves 2 (M - 1) b bits
        per element over all M ranks.
        """
        own = [self.bytes_sent, self.messages, self.seconds_communicating, self.seconds_training]
        rows = gather_rows(comm, np.array(own, np.float64))
        moved = self.vectors_moved * n_parameters
        return {
            "rounds_so_far": self.rounds,
            "bytes_so_far_per_rank": float(rows[:, 0].mean()),
            "messages_so_far_per_rank": float(rows[:, 1].mean()),
            "seconds_communicating_so_far": float(rows[:, 2].max()),
            "seconds_so_far": float(rows[:, 3].max()),
            "bits_per_element": 8 * float(rows[:, 0].mean()) / moved if moved else 0.0,
        }

    def per_round(self, comm: Communicator) -> dict[str, Any]:
        """One synchronization, in the terms of ``mpicomp bench``; collective. Seconds are those of the slowest rank."""
        median, p99 = np.percentile(self.round_seconds or [0.0], (50, 99))
        rows = gather_rows(comm, np.array([median, p99, self.bytes_sent, self.messages], np.float64))
        rounds = max(1, self.rounds)
        return {
            "seconds": float(rows[:, 0].max()),
            "p99_seconds": float(rows[:, 1].max()),
            "bytes_sent_per_rank": float(rows[:, 2].mean()) / rounds,
            "messages_per_rank": float(rows[:, 3].mean()) / rounds,
        }

    def state_dict(self) -> dict[str, Any]:
        """The totals, without the single synchronizations."""
        return {key: value for key, value in vars(self).items() if key != "round_seconds"}

    @staticmethod
    def merge(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The totals that each of other ranks goes on from: bytes and messages of the mean rank, the slowest's seconds.

        The ranks have made the same synchronizations.
        """
        means = {key: round(np.mean([state[key] for state in states])) for key in ("bytes_sent", "messages")}
        seconds = ("seconds_communicating", "seconds_training")
        return {**states[0], **means, **{key: max(state[key] for state in states) for key in seconds}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from totals that `state_dict` returned."""
        for key in self.state_dict():
            setattr(self, key, state[key])
