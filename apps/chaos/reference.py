"""The same training by threads: its groups of ranks are those that the job's survivors report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np

import mpicomp
from apps.chaos.case import Case
from apps.chaos.training import Training
from collectives import Communicator
from mpicomp.state.redistribute import among_survivors

Group = tuple[int, ...]
Place = tuple[Any, dict[int, dict[str, Any]], Group]
MOST_ORDERED = 5  # ranks that die between two steps, of which all orders are tried


class Step(NamedTuple):
    """A step of the reference."""

    digest: int
    loss: float
    residuals: dict[int, float]  # sum of the magnitudes of each rank's residual


class Reference:
    """A training by threads that can go on with fewer ranks."""

    def __init__(self, case: Case) -> None:
        self._case = case
        # model, states and ranks after the accepted steps; set it to an earlier one to go back there
        self.place: Place = np.zeros(case.n, np.float32), {}, ()
        # each pending error belongs to an owner, so the survivors divide the errors whenever they regroup
        self.has_owners = False

    def paths(self, group: Group, place: Place) -> Iterator[tuple[Group, ...]]:
        """Yield the groups over which the ranks of this place may have become these ones."""
        yield ()
        if self.has_owners and len(dead := sorted(set(place[2]) - set(group))) <= MOST_ORDERED:
            for order in permutations(dead):
                for count in range(1, len(dead)):
                    for cuts in combinations(range(1, len(dead)), count):
                        yield tuple(tuple(sorted({*group, *order[cut:]})) for cut in cuts)

    def steps(self, group: Group, first: int, last: int, path: Sequence[Group] = ()) -> list[Step]:
        """Make the steps from `first` to before `last` with these ranks, after regrouping over `path`."""
        start = self.place
        for one in path:
            self._make(one, first, first)
            self.accept()
        made = self._make(group, first, last)
        self.place = start
        return made

    def _make(self, group: Group, first: int, last: int) -> list[Step]:
        case, (model, states, before) = self._case, self.place

        def train(comm: Communicator) -> tuple[Any, dict[str, Any], list[tuple[int, float, float]]]:
            me = group[comm.rank]
            training = Training(case, me)
            training.model = model
            aggregator = training.start(comm)
            if states:
                state, kinds = states[me], aggregator.state_kinds
                self.has_owners = not {kinds[key] for key in state} <= {"mean", "shared"}
                if group != before and self.has_owners:
                    state = among_survivors([states[one] for one in group], kinds, None)
                aggregator.load_state_dict(state)
            made = []
            for step in range(first, last):
                training.apply(aggregator.aggregate(training.vector(step)))
                residual: Any = aggregator.residual
                empty = residual is None or not residual.size
                size = 0.0 if empty else float(np.abs(residual).sum(dtype=np.float64))
                made.append((training.digest, training.loss, size))
            return training.model, aggregator.state_dict(), made

        ended = mpicomp.run_local(len(group), train, topology=case.topology)
        self._after: Place = ended[0][0], {me: state for me, (_, state, _) in zip(group, ended, strict=True)}, group
        return [
            Step(rows[0][0], rows[0][1], {me: row[2] for me, row in zip(group, rows, strict=True)})
            for rows in zip(*(made for _, _, made in ended), strict=True)
        ]

    def accept(self) -> None:
        """Go on from the end of the last `steps`; else the next ones begin where these began."""
        self.place = self._after


def groups_between(before: Sequence[int], after: Sequence[int]) -> list[Group]:
    """Return the groups that may have made a step before which and after which these ranks lived.

    Examples
    --------
    >>> from apps.chaos.reference import groups_between
    >>> groups_between([0, 1, 2], [0, 2])
    [(0, 2), (0, 1, 2)]
    """
    dead = sorted(set(before) - set(after))
    return [tuple(sorted({*after, *some})) for count in range(len(dead) + 1) for some in combinations(dead, count)]
