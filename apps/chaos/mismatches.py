"""Sequences of calls on several communicators, in which one rank makes another call: all ranks raise the same error.

Ranks are threads. Up to ten calls are in flight, and each rank waits for them in an order of its own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

import mpicomp
from collectives import Communicator
from collectives.errors import CollectiveError
from mpicomp.algorithms import Aggregator

N_GROUPS, LONGEST, N_WAITING = 3, 12, 10
PATIENCE_S = 3.0
Op = Literal["sum", "mean", "max"]
OPS: tuple[Op, ...] = ("sum", "mean", "max")
DTYPES, LENGTHS = ("float32", "float64"), (1, 50, 20_000)
METHODS = ("marsit", "local-top-k")
N_AGGREGATED = 64
KINDS = ("iallreduce", "iallreduce", "aggregate", "aggregate", "allreduce", "broadcast", "allgather", "barrier")


@dataclass(frozen=True)
class PlannedCall:
    """A call of a sequence, on one of the communicators. A `kind` uses those of the other fields that it needs."""

    group: int
    kind: str
    n: int
    dtype: str
    op: Op
    root: int
    method: str

    @classmethod
    def draw(cls, draw: random.Random, ranks: int) -> PlannedCall:
        """Return a random call."""
        return cls(
            draw.randrange(N_GROUPS), draw.choice(KINDS), draw.choice(LENGTHS), draw.choice(DTYPES), draw.choice(OPS),
            draw.randrange(ranks), draw.choice(METHODS),
        )  # fmt: skip

    @property
    def visible(self) -> tuple[object, ...]:
        """All that the ranks compare."""
        fields: dict[str, tuple[object, ...]] = {
            "iallreduce": (self.n, self.dtype, self.op),
            "allreduce": (self.n, self.dtype, self.op),
            "broadcast": (self.n, self.dtype, self.root),
            "allgather": (self.dtype,),  # ranks may have different numbers of rows
            "aggregate": (self.method,),
            "barrier": (),
        }
        return self.group, self.kind, *fields[self.kind]


Sequence = tuple[PlannedCall, ...]


def draw_sequence(seed: int, ranks: int) -> tuple[Sequence, Sequence, int, str]:
    """Return the calls of most ranks, those of the odd one, its rank, and the name of the mutation."""
    draw = random.Random(seed)
    calls = tuple(PlannedCall.draw(draw, ranks) for _ in range(draw.randint(2, LONGEST)))
    odd = draw.randrange(ranks)
    while True:
        name = draw.choice(list(MUTATIONS))
        changed = MUTATIONS[name](draw, calls, ranks)
        if any(_of_group(calls, group) != _of_group(changed, group) for group in range(N_GROUPS)):
            return calls, changed, odd, name


def _of_group(calls: Sequence, group: int) -> list[tuple[object, ...]]:
    return [call.visible for call in calls if call.group == group]


def _change(draw: random.Random, calls: Sequence, ranks: int) -> Sequence:
    """Make another call of the same communicator in place of one."""
    at = draw.randrange(len(calls))
    other = replace(PlannedCall.draw(draw, ranks), group=calls[at].group)
    return (*calls[:at], other, *calls[at + 1 :])


def _change_option(draw: random.Random, calls: Sequence, ranks: int) -> Sequence:
    """Change one option of a call."""
    at, other = draw.randrange(len(calls)), PlannedCall.draw(draw, ranks)
    name = draw.choice(("n", "dtype", "op", "root", "method"))
    return (*calls[:at], replace(calls[at], **{name: getattr(other, name)}), *calls[at + 1 :])


def _leave_out(draw: random.Random, calls: Sequence, ranks: int) -> Sequence:
    at = draw.randrange(len(calls))
    return (*calls[:at], *calls[at + 1 :])


def _repeat(draw: random.Random, calls: Sequence, ranks: int) -> Sequence:
    at = draw.randrange(len(calls))
    return (*calls[: at + 1], *calls[at:])


def _swap(draw: random.Random, calls: Sequence, ranks: int) -> Sequence:
    """Swap a call with the next one of its communicator."""
    at = draw.randrange(len(calls))
    later = [other for other in range(at + 1, len(calls)) if calls[other].group == calls[at].group]
    swapped = list(calls)
    if later:
        swapped[at], swapped[later[0]] = calls[later[0]], calls[at]
    return tuple(swapped)


MUTATIONS: dict[str, Callable[[random.Random, Sequence, int], Sequence]] = {
    "another call": _change,
    "another option": _change_option,
    "a call left out": _leave_out,
    "a call made twice": _repeat,
    "two calls swapped": _swap,
}


@dataclass(frozen=True)
class Outcome:
    """Errors of all ranks after one sequence; `problem` is empty if they are the same."""

    # A rank that waits on another communicator quotes the error of the rank that has left: its cause is the same. Where
    # the odd rank waits on one communicator and the others on another one, no call differs, and all ranks raise
    # `CollectiveTimeout`: each names the ranks that *it* waits for.
    seed: int
    mutation: str
    errors: tuple[str, ...]

    @property
    def is_timeout(self) -> bool:
        """True if all ranks waited until their timeouts."""
        return all(error.startswith("CollectiveTimeout") for error in self.errors)

    @property
    def problem(self) -> str:
        """Reason why this outcome is a fault of the library."""
        if "" in self.errors:
            return "a rank raised no error"
        if self.is_timeout:
            return ""
        causes = {(error.partition(":")[0], *_CAUSE.findall(error)[:1]) for error in self.errors}
        return "" if len(causes) == 1 and len(causes.pop()) == 2 else "the ranks raised different errors"


_CAUSE = re.compile(r"the ranks differ in collective call .*")


def play(comm: Communicator, seed: int) -> str:
    """Make one rank's calls; returns its first error, or "" if it raised none."""
    calls, changed, odd, _ = draw_sequence(seed, comm.size)
    own = changed if comm.rank == odd else calls
    draw = random.Random(comm.rank)
    try:
        with ExitStack() as stack:
            groups = [stack.enter_context(comm.split(0)) for _ in range(N_GROUPS)]
            aggregators = [
                {name: mpicomp.algorithm(name).start(group, N_AGGREGATED) for name in METHODS} for group in groups
            ]
            waiting: list[tuple[object, Any]] = []  # with the aggregator, which has one call in flight at most
            for call in own:
                aggregator = aggregators[call.group][call.method] if call.kind == "aggregate" else None
                for one in [one for one in waiting if one[0] is aggregator is not None]:
                    waiting.remove(one)
                    one[1].wait()
                if (handle := _begin(groups[call.group], aggregator, call)) is not None:
                    waiting.append((aggregator, handle))
                if len(waiting) >= N_WAITING or (waiting and draw.random() < 0.2):
                    waiting.pop(draw.randrange(len(waiting)))[1].wait()
            while waiting:
                waiting.pop(draw.randrange(len(waiting)))[1].wait()
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _begin(comm: Communicator, aggregator: Aggregator | None, call: PlannedCall) -> Any:
    """Make a blocking call, or return the handle of another."""
    if call.kind == "barrier":
        comm.barrier()
        return None
    if aggregator is not None:
        return aggregator.begin(np.ones(N_AGGREGATED, np.float32))
    vector = np.ones(call.n, call.dtype)
    if call.kind == "broadcast":
        comm.broadcast(vector, root=call.root)
    elif call.kind == "allgather":
        comm.allgather(vector)
    elif call.kind == "allreduce":
        comm.allreduce(vector, call.op)
    else:
        return comm.iallreduce(vector, call.op)
    return None


def outcome(seed: int, ranks: int) -> Outcome:
    """Play one sequence on ranks that are threads."""
    patience = PATIENCE_S
    errors = mpicomp.run_local(ranks, lambda comm: play(comm, seed), timeout=patience, arrival_timeout=patience)
    return Outcome(seed, draw_sequence(seed, ranks)[3], tuple(errors))


def campaign(seeds: Iterable[int], report: Callable[[Outcome], None]) -> dict[str, int]:
    """Play many sequences on 2 to 4 ranks, and report faults; return the numbers of mismatches, timeouts and faults."""
    counts = {"mismatches": 0, "timeouts": 0, "faults": 0}
    for seed in seeds:
        found = outcome(seed, 2 + seed % 3)
        if found.problem:
            report(found)
        counts["faults" if found.problem else "timeouts" if found.is_timeout else "mismatches"] += 1
    return counts
