"""One rank of a soak: ``python -m apps.chaos.soak_rank REQUEST.json``.

It makes calls that are drawn from a seed: steps of all methods, sums of every kind, exchanges. Whenever a part of the
calls has ended, it writes a line with its memory and the library's counts.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import mpicomp
from apps.chaos.lines import Lines
from apps.performance.memory import give_back, resident_bytes
from apps.records import Record, read_record
from collectives import Communicator, RanksLost
from mpicomp.algorithms import Aggregator

TIMEOUT_S = 120.0
ALIVE_S = 30.0  # between two lines by which the watchdog sees that a rank goes on
LENGTHS = (3, 500, 10_000, 60_000, 300_000)
# long vectors are rare, or a million calls would take days
WEIGHTS = (8, 8, 4, 1, 0.3)
OPERATIONS: tuple[Literal["sum", "mean", "min", "max"], ...] = ("sum", "mean", "min", "max")
KINDS = ("aggregate", "aggregate", "sum", "sums", "object", "rows", "barrier", "broadcast")
ADMIT_EVERY = 50  # calls
MADE_AGAIN_EVERY = 500  # calls, where no rank joins
FULL_PRECISION_EVERY = 10  # of Marsit's steps
LONGEST_FUSE_S = 0.004  # from a rank's arming until it dies, in the middle of a later call


class Soak:
    """Calls of one rank, by a request of `apps.chaos.soak.Soak.request`."""

    def __init__(self, request: Record, comm: Communicator, lines: Lines) -> None:
        self._seed, self._calls, self._look_every = request["seed"], request["calls"], request["look_every"]
        self._deaths, self._regroups = set(request["deaths"]), request["on_failure"] == "regroup"
        self._comm, self._lines = comm, lines
        # calls that have ended; all results since the last comparison, which must be equal on all ranks
        self.number = self.checksum = 0
        self._methods: list[str] = request["methods"]
        self._aggregators: list[Aggregator] = [self._start(name, n) for name in self._methods for n in LENGTHS]
        draw = np.random.default_rng(self._seed)
        self._vectors = [draw.standard_normal(n, np.float32) for n in LENGTHS]
        self._results = [np.empty(n, np.float32) for n in LENGTHS]

    def _start(self, name: str, n: int) -> Aggregator:
        options: dict[str, Any] = {"full_precision_every": FULL_PRECISION_EVERY} if name == "marsit" else {}
        return mpicomp.algorithm(name, **options).start(self._comm, n)

    def run(self, is_spare: bool) -> None:
        """Make all calls; a spare makes those after its admission."""
        if not is_spare:
            self._use_all()
        last = time.monotonic()
        while self.number < self._calls:
            if time.monotonic() > last + ALIVE_S:
                last = time.monotonic()
                self._lines.write("alive", call=self.number)
            if (
                self._regroups
                and self.number % ADMIT_EVERY == 0
                and self._comm.admit(lambda: (self.number, self.checksum), self._load)
            ):
                self._use_all()
            if self.number in self._deaths:
                self._light_fuse()
            self._call(random.Random(f"{self._seed} {self.number}"))
            self.number += 1
            if self.number % self._look_every == 0:
                self._look()

    def _use_all(self) -> None:
        """Let all aggregators allocate their buffers, which would look like growth later."""
        for place in range(len(self._aggregators)):
            self._use(place)

    def _use(self, place: int) -> None:
        index, name = place % len(LENGTHS), self._methods[place // len(LENGTHS)]
        for _ in range(FULL_PRECISION_EVERY + 1 if name == "marsit" else 2):
            self._check(self._aggregators[place].aggregate(self._vectors[index], out=self._results[index]))

    def _load(self, saved: tuple[int, int]) -> None:
        self.number, self.checksum = saved

    def _light_fuse(self) -> None:
        draw = random.Random(f"{self._seed} death {self.number}")
        victim, seconds = draw.randrange(self._comm.size), draw.uniform(1e-5, LONGEST_FUSE_S)
        if self._comm.size > 1 and self._comm.rank == victim:
            self._lines.write("death", call=self.number)
            signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process wherever it is

    def _call(self, draw: random.Random) -> None:
        comm, index = self._comm, draw.choices(range(len(LENGTHS)), WEIGHTS)[0]
        kind = draw.choice(KINDS)
        if kind == "aggregate":
            self._aggregate(draw, index)
        elif kind == "sum":
            vector = self._vectors[index] + np.float32(comm.rank)
            self._check(comm.allreduce(vector, draw.choice(OPERATIONS)))
        elif kind == "sums":
            handles = [comm.iallreduce(vector.copy(), "mean") for vector in self._vectors[: draw.randint(1, 4)]]
            draw.shuffle(handles)
            for handle in handles:
                self._check(handle.wait())
        elif kind == "object":
            self._check(np.array([len(text) for text in comm.allgather_object("x" * draw.randint(1, 500))]))
        elif kind == "rows":
            self._check(comm.allgather(self._vectors[min(index, 2)]).reshape(-1))
        elif kind == "barrier":
            comm.barrier()
        else:
            self._broadcast(index)

    def _aggregate(self, draw: random.Random, index: int) -> None:
        place = draw.randrange(len(self._methods)) * len(LENGTHS) + index
        if not self._regroups and draw.randrange(MADE_AGAIN_EVERY) == 0:
            self._aggregators[place] = self._start(self._methods[place // len(LENGTHS)], LENGTHS[index])
            self._use(place)
        vector = self._vectors[index] * np.float32(1 + 0.1 * self._comm.rank)
        self._check(self._aggregators[place].aggregate(vector, out=self._results[index]))

    def _broadcast(self, index: int) -> None:
        vector = self._vectors[index].copy()
        try:
            self._comm.broadcast(vector, 0)
        except RanksLost:  # on all survivors
            return
        self._check(vector)

    def _check(self, result: NDArray[Any]) -> None:
        """Add a result to the checksum, which the ranks compare at the next look."""
        ends = result[:16].tobytes() + result[-16:].tobytes()
        self.checksum = zlib.crc32(ends, self.checksum)

    def _look(self) -> None:
        comm = self._comm
        gc.collect()  # first: the requests of aggregators that are gone are freed with the next call
        sums = comm.allgather_object(self.checksum)
        give_back()  # after a death all aggregators have new buffers, between which the old ones leave gaps
        self._lines.write(
            "look", call=self.number, members=comm.members, is_equal=len(set(sums)) == 1, **counts(comm),
        )  # fmt: skip
        self.checksum = 0


def counts(comm: Communicator) -> dict[str, float]:
    """Return resident memory and the numbers of objects of a rank that must not grow."""
    users, routes = comm.users, comm.routes
    return {
        "resident_mb": resident_bytes() / 2**20,
        "objects": len(gc.get_objects()),
        "in_flight": len(comm.calls.in_flight()),
        "requests": sum(len(cache) for _, cache in users._requests.values()),
        "users": len(users._requests),
        "tag": users.last_tag,
        "programs": len(routes._programs),
        "plans": len(routes._plans),
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": threading.active_count(),
    }


def main() -> None:
    """Run one rank."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the watchdog's request for stacks
    request = read_record(Path(sys.argv[1]))
    lines = Lines(Path(sys.argv[1]).parent / f"rank-{MPI.COMM_WORLD.rank}.jsonl")
    lines.write("start", pid=os.getpid())
    with Communicator(timeout=TIMEOUT_S, on_failure=request["on_failure"], spares=request["spares"]) as comm:
        soak = Soak(request, comm, lines)
        soak.run(MPI.COMM_WORLD.rank >= request["ranks"])
        lines.write("end", in_flight=len(comm.calls.ordered))


if __name__ == "__main__":
    main()
