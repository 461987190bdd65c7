"""Halving-doubling all-reduce: recursive vector halving with distance doubling, then the way back.

Four ranks, four chunks a b c d; partners are at distance 1, then 2, so that the longest messages go to neighbours::

            rank 0              rank 1              rank 2              rank 3
    step 0  sends cd to 1       sends ab to 0       sends cd to 3       sends ab to 2       1 rank, merged into 1
    step 1  sends b to 2        sends d to 3        sends a to 0        sends c to 1        2 ranks, merged into 2
    step 2  sends a to 2        sends c to 3        sends b to 0        sends d to 1        4 ranks, overwriting
    step 3  sends ab to 1       sends cd to 0       sends ab to 3       sends cd to 2       4 ranks, overwriting

Rounds 2 log2 M; bytes sent per rank 2 (M - 1)/M of the vector, for M a power of two.

For other M the core consists of P ranks, P being the largest power of two below M. Each of the M - P extra ranks sends
its vector to a neighbour in the core before, and receives the result after, in two more rounds. Runs of chunks travel
in the order in which the neighbour needs and completes them, so that these rounds overlap the halving and doubling.
Bytes sent: an extra rank the vector once, its neighbour 2 (P - 1)/P + 1 times.

Reference: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
Int. J. High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives.schedules.plan import Plan, Transfer, steps_by_time


def _halves(position: int, rounds: int) -> tuple[list[range], list[range]]:
    """Return the runs of chunks that a core position gives away, and those that it keeps, by halving round."""
    given: list[range] = []
    kept: list[range] = []
    run = range(1 << rounds)
    for bit in range(rounds):
        middle = (run.start + run.stop) // 2
        lower, upper = range(run.start, middle), range(middle, run.stop)
        run, other = (upper, lower) if position >> bit & 1 else (lower, upper)
        kept.append(run)
        given.append(other)
    return given, kept


@dataclass(frozen=True, slots=True)
class HalvingDoubling:
    """Recursive halving and doubling; for any number of ranks.

    Examples
    --------
    >>> from collectives import HalvingDoubling
    >>> from collectives.schedules.verify import all_plans, prove
    >>> [prove(all_plans(HalvingDoubling(), size)).rounds for size in (4, 8, 16)]
    [4, 6, 8]
    >>> [step.sends[0].peer for step in HalvingDoubling().plan(rank=0, size=8).steps]
    [1, 2, 4, 4, 2, 1]
    """

    name = "halving-doubling"

    def plan(self, rank: int, size: int) -> Plan:
        """Return the part of rank ``rank`` among ``size`` ranks."""
        rounds = size.bit_length() - 1
        n_extras = size - (1 << rounds)
        # Ranks below 2 n_extras form pairs of a core rank (even) and its extra rank (odd); all others are core ranks.
        paired = rank < 2 * n_extras
        position = rank // 2 if paired else rank - n_extras
        given, kept = _halves(position, rounds)
        # In the order in which the core rank passes the runs on; it keeps the last one to the end.
        runs = [*given, kept[-1]] if rounds else []
        if paired and rank % 2:
            core = rank - 1
            sends = [(0, Transfer(core, run, 1)) for run in runs]
            recvs = [(rounds + 1 + i, Transfer(core, run, size)) for i, run in enumerate(reversed(runs))]
            return Plan(rank, size, 1 << rounds, steps_by_time(sends, recvs))
        sends, recvs = [], []
        for bit in range(rounds):
            other = position ^ 1 << bit
            partner = 2 * other if other < n_extras else other + n_extras
            mine, theirs = (self._weight(p, bit, n_extras) for p in (position, other))
            halving, doubling = 1 + bit, 2 * rounds - bit
            sends += [(halving, Transfer(partner, given[bit], mine)), (doubling, Transfer(partner, kept[bit], size))]
            recvs += [
                (halving, Transfer(partner, kept[bit], theirs, mine)),
                (doubling, Transfer(partner, given[bit], size)),
            ]
        if paired:
            extra = rank + 1
            recvs += [(0, Transfer(extra, run, 1, 1)) for run in runs]
            sends += [(rounds + 1 + i, Transfer(extra, run, size)) for i, run in enumerate(reversed(runs))]
        return Plan(rank, size, 1 << rounds, steps_by_time(sends, recvs))

    @staticmethod
    def _weight(position: int, bit: int, n_extras: int) -> int:
        """Return how many ranks, extra ones included, are summed at a core position before halving round ``bit``."""
        group = 1 << bit
        first = position & -group
        return group + min(max(n_extras - first, 0), group)
