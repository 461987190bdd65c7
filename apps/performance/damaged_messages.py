"""``python -m apps.performance.damaged_messages``: how many damaged messages checksums find, and how many pass without.

Each trial makes one call on several ranks, which are threads, and flips bits of one message that a rank receives. Call,
topology, length, ranks, message, bit and number of bits are drawn from the seed. A trial ends in one of these ways:

found
    All ranks raise `DamagedMessage`, in this call or in the next.
another error
    All ranks raise an error of another kind, such as a timeout.
harmless
    All ranks return the result of the undamaged call.
wrong
    A rank returns another result, or only some ranks raise an error.

Messages of a barrier are empty, and those about missing ranks are not damaged.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

import mpicomp
from collectives.annotations import Bytes, Testable, override
from collectives.checksums.checked_messages import memory_of
from collectives.consistency.missing_ranks import TAG as CONTROL_TAG

TIMEOUT_S = 1.0  # of a call without checksums whose damage makes ranks wait for each other
CHUNK = 1000  # trials of a process: a communicator that has failed keeps its buffers
TOPOLOGIES = ("ring", "tree", "halving-doubling", "auto")
LENGTHS = (1, 63, 1000, 20_000)
RANKS = (2, 3, 4)


class Damage(NamedTuple):
    """Bits to flip in the message that a rank receives as number `message`; bits are numbered modulo its length."""

    message: int
    bits: tuple[int, ...]


class Damager:
    """Counter of the messages that a rank receives, which flips bits in one of them."""

    def __init__(self, damage: Damage | None) -> None:
        self._damage, self.received, self.hit = damage, 0, False

    def take(self, memory: Bytes) -> None:
        """Count a message, and damage it if it is the one."""
        if memory.size == 0:
            return
        if self._damage is not None and self.received == self._damage.message:
            for bit in {bit % (8 * memory.size) for bit in self._damage.bits}:  # a bit flipped twice would be right
                memory[bit // 8] ^= 1 << bit % 8
            self.hit = True
        self.received += 1


class DamagedComm:
    """Communicator of mpi4py, or of `collectives.threads`, whose received messages pass a `Damager`."""

    def __init__(self, comm: Any, damager: Damager) -> None:
        self._comm, self._damager, self.rank, self.size = comm, damager, comm.rank, comm.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_comm"], name)

    def Dup(self) -> DamagedComm:  # noqa: N802 - MPI's name, as below
        """Return a duplicate, with the same damage."""
        return DamagedComm(self._comm.Dup(), self._damager)

    def Split(self, color: int = 0, key: int = 0) -> DamagedComm:  # noqa: N802
        """Return the part of this rank, with the same damage."""
        return DamagedComm(self._comm.Split(color, key), self._damager)

    def Irecv(self, buffer: Any, source: int, tag: int) -> Any:  # noqa: N802
        """Receive a message."""
        request = self.Recv_init(buffer, source, tag)
        request.Start()
        return request

    def Recv_init(self, buffer: Any, source: int, tag: int) -> Any:  # noqa: N802
        """Make a persistent receive."""
        request = self._comm.Recv_init(buffer, source, tag)
        return request if tag == CONTROL_TAG else _Received(request, memory_of(buffer), self._damager)

    def Ibcast(self, buffer: Any, root: int) -> Any:  # noqa: N802
        """Receive the root's buffer."""
        request = self._comm.Ibcast(buffer, root)
        return request if self.rank == root else _Received(request, memory_of(buffer), self._damager, True)

    def Iallgather(self, source: Any, landing: Any) -> Any:  # noqa: N802
        """Receive the buffers of all ranks; this rank's own is a message, too."""
        return _Received(self._comm.Iallgather(source, landing), memory_of(landing), self._damager, True)

    def Iallgatherv(self, source: Any, landing: Any) -> Any:  # noqa: N802
        """Receive buffers of different lengths."""
        return _Received(self._comm.Iallgatherv(source, landing), memory_of(landing), self._damager, True)

    def Ialltoallv(self, source: Any, landing: Any) -> Any:  # noqa: N802
        """Receive a part of the buffer of each rank."""
        return _Received(self._comm.Ialltoallv(source, landing), memory_of(landing), self._damager, True)

    def Iallreduce(self, source: Any, landing: Any, op: MPI.Op = MPI.SUM) -> Any:  # noqa: N802
        """Receive the sum, which stands for MPI's own messages."""
        return _Received(self._comm.Iallreduce(source, landing, op), memory_of(landing), self._damager, True)


class _Received(Testable):
    """Request whose message is damaged once it has come; `whole`: it is as long as the memory."""

    def __init__(self, request: Any, memory: Bytes | None, damager: Damager, whole: bool = False) -> None:
        assert memory is not None
        self._request, self._memory, self._damager, self._whole = request, memory, damager, whole
        self._waits, self._status = whole, MPI.Status()

    def Start(self) -> None:  # noqa: N802
        self._waits = True
        self._request.Start()

    @override
    def Test(self) -> bool:  # noqa: N802
        if self._waits and self._request.Test(self._status):
            self._waits = False
            length = self._memory.size if self._whole else self._status.Get_count(MPI.BYTE)
            self._damager.take(self._memory[:length])
        return not self._waits

    def Free(self) -> None:  # noqa: N802
        self._request.Free()


# Calls ----------------------------------------------------------------------------------------------------------------


def _aggregate(method: str, comm: mpicomp.Communicator, x: Any) -> Any:
    aggregator = mpicomp.algorithm(method).start(comm, x.size)
    return aggregator.aggregate(x), aggregator.aggregate(x)


def _send(comm: mpicomp.Communicator, x: Any) -> Any:
    out = np.empty_like(x)
    handle = comm.irecv(out, source=(comm.rank - 1) % comm.size)
    comm.send(x, to=(comm.rank + 1) % comm.size)
    handle.wait()
    return out


METHODS = ("marsit", "qsgd", "double-squeeze", "top-k-sgd", "scalecom", "majority-vote", "ef-signsgd", "power-sgd")
CALLS: dict[str, Callable[[mpicomp.Communicator, Any], Any]] = {
    **{method: partial(_aggregate, method) for method in METHODS if method in mpicomp.ALGORITHMS},
    "allreduce": lambda comm, x: comm.allreduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x, root=comm.size - 1),
    "allgather": lambda comm, x: comm.allgather(x[: x.size - comm.rank * x.size // 8]),
    "allgather_object": lambda comm, x: comm.allgather_object(x.tobytes()),
    "broadcast_object": lambda comm, x: comm.broadcast_object(x.tobytes() if comm.rank == 0 else None),
    "send": _send,
}


class Case(NamedTuple):
    """Call of a trial."""

    call: str
    topology: str
    length: int
    ranks: int


class Outcome(NamedTuple):
    """End of a call on one rank: its result as bytes, or the name of its error and the text."""

    result: bytes
    error: str
    text: str
    received: int


def run(case: Case, checksums: bool, victim: int = 0, damage: Damage | None = None) -> list[Outcome]:
    """Make the call of a case, with damage to a message that rank `victim` receives; return the end on each rank."""

    def on_rank(outer: mpicomp.Communicator) -> Outcome:
        damager = Damager(None)
        x = np.random.default_rng(outer.rank).standard_normal(case.length, np.float32)
        result, error, text, timeout_s = b"", "", "", TIMEOUT_S * (30 if checksums else 1)
        try:
            comm = mpicomp.Communicator(
                cast(Any, DamagedComm(outer.mpi_comm, damager)),
                cast(Any, case.topology),
                timeout_s,
                arrival_timeout=timeout_s,
                abort_hook=False,
                checksums=checksums,
            )
            damager.__init__(damage if outer.rank == victim else None)  # type: ignore[misc]
            result = _bytes_of(CALLS[case.call](comm, x))
            received = damager.received
            comm.barrier()
            comm.barrier()
        except Exception as failure:  # noqa: BLE001 - any error is an outcome
            error, text, received = type(failure).__name__, str(failure), damager.received
        outer.mpi_comm.Ibarrier()
        return Outcome(result, error, text, received)

    return mpicomp.run_local(case.ranks, on_rank)


def _bytes_of(result: Any) -> bytes:
    if isinstance(result, np.ndarray):
        return result.tobytes()
    return b"".join(map(_bytes_of, result)) if isinstance(result, list | tuple) else bytes(result)


@cache
def run_undamaged(case: Case, checksums: bool) -> list[Outcome]:
    """Return the ends of a call without damage."""
    outcomes = run(case, checksums)
    assert not any(one.error for one in outcomes), (case, outcomes)
    return outcomes


def draw(generator: np.random.Generator, checksums: bool) -> tuple[Case, int, Damage]:
    """Return a case, the rank that receives the damaged message, and the damage."""
    while True:
        call, topology = (str(generator.choice(one)) for one in ([*CALLS], TOPOLOGIES))
        length, ranks = (int(generator.choice(one)) for one in (LENGTHS, RANKS))
        case = Case(call, topology, length, ranks)
        victim = int(generator.integers(case.ranks))
        received = run_undamaged(case, checksums)[victim].received
        if received:
            bits = generator.integers(1 << 40, size=generator.choice([1, 1, 1, 2, 3, 8]))
            return case, victim, Damage(int(generator.integers(received)), tuple(bits.tolist()))


def classify(case: Case, checksums: bool, outcomes: list[Outcome]) -> str:
    """Return in which way a trial has ended."""
    expected = run_undamaged(case, checksums)
    right = all(not one.result or one.result == want.result for one, want in zip(outcomes, expected, strict=True))
    errors = [one.error for one in outcomes]
    if not any(errors):
        return "harmless" if right else "wrong"
    if not right or not all(errors):
        return "wrong"
    return "found" if set(errors) == {"DamagedMessage"} else "another error"


def campaign(seed: int, trials: int, checksums: bool) -> Counter[str]:
    """Return how many trials have ended in which way, by call."""
    logging.getLogger("collectives").setLevel(logging.CRITICAL)
    generator, counts = np.random.default_rng([seed, checksums]), Counter[str]()
    for _ in range(trials):
        case, victim, damage = draw(generator, checksums)
        ending = classify(case, checksums, run(case, checksums, victim, damage))
        counts[f"{case.call}: {ending}"] += 1
        counts[ending] += 1
        if checksums and ending != "found":
            print(json.dumps([ending, case, victim, damage]), flush=True)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts with and without checksums; returns 1 if checksums have missed a message."""
    parser = argparse.ArgumentParser(prog="python -m apps.performance.damaged_messages", description=__doc__)
    parser.add_argument("--trials", type=int, default=1000, help="with checksums; default: 1000")
    parser.add_argument("--without", type=int, default=200, help="trials without checksums; default: 200")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one a core")
    options = parser.parse_args(argv)
    missed = 0
    with ProcessPoolExecutor(options.processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        for checksums, trials in ((True, options.trials), (False, options.without)):
            starts = range(0, trials, CHUNK)
            seeds = [options.seed * 1_000_000 + start for start in starts]
            lengths = [min(CHUNK, trials - start) for start in starts]
            counts = sum(pool.map(campaign, seeds, lengths, [checksums] * len(seeds)), Counter())
            print(f"checksums={checksums}, {trials} messages damaged:", flush=True)
            for ending, count in sorted(counts.items()):
                print(f"{count:7} {ending}", flush=True)
            missed += checksums and counts["found"] != trials
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
