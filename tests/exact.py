"""Ranks take steps of a method, over MPI or as threads: results and states are those of one process, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, groupby
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator
from collectives.schedules.plan import Topology
from collectives.threads.run_local import run_local
from tests.mpi.lanes import TIMEOUT_S
from tests.reference.one_process.simulation import simulation

Vectors = NDArray[Any]
ONE_BLOCK = 512  # bytes of the shortest piece of packed signs


@lru_cache(maxsize=256)
def gradient(rank: int, step: int, n: int, dtype: str = "float32", lengths: tuple[int, ...] = ()) -> Vectors:
    """Return one rank's vector: some signal, much noise, sizes that change along it, ties, and zeros between tensors.

    Of "bfloat16" it is the float32 vector rounded to that type.
    """
    common, own = (np.random.default_rng(seed).standard_normal(n) for seed in ([step], [step, rank]))
    made = (common / 2 + own) * np.linspace(0.5, 2, max(n, 1))[:n]
    made[::5] = np.round(made[::5])
    made[::97], made[700:800] = 0, 0
    end = 0
    for length in lengths[:-1]:
        end += -(-length // 64) * 64
        made[end - -length % 64 : end] = 0
    if dtype == "bfloat16":
        import torch

        return torch.from_numpy(made).to(torch.bfloat16).float().numpy()
    made = made.astype(dtype)
    made.flags.writeable = False
    return made


@dataclass(frozen=True)
class Trial:
    """Steps of a method on some ranks. Half way another aggregator goes on from the first one's state.

    Parameters
    ----------
    options : Algorithm
    n, steps : int
    dtype : str
    lengths : tuple of int
        Of the tensors; () is one tensor.
    vector_id : int
        The words drawn for it are not those of vector 0.
    """

    options: Any
    n: int
    steps: int = 6
    dtype: str = "float32"
    lengths: tuple[int, ...] = ()
    vector_id: int = 5

    @property
    def kind(self) -> Any:
        """The NumPy type of the results, and "bfloat16" where NumPy has none."""
        return self.dtype if self.dtype == "bfloat16" else np.dtype(self.dtype)

    def gradient(self, rank: int, step: int) -> Vectors:
        """Return one rank's vector at a step."""
        return gradient(rank, step, self.n, self.dtype, self.lengths)

    def given(self, rank: int, step: int) -> Any:
        """Return the same vector as the aggregator takes it."""
        if self.dtype != "bfloat16":
            return self.gradient(rank, step)
        import torch

        return torch.from_numpy(self.gradient(rank, step)).to(torch.bfloat16)

    def take(self, comm: Communicator) -> tuple[Vectors, dict[str, Any]]:
        """Take a rank's part in all steps. Return every step's result and the last state."""
        first, second = (
            self.options.start(
                comm, self.n, dtype=self.dtype, vector_id=self.vector_id, tensor_lengths=self.lengths or None
            )
            for _ in range(2)
        )
        second.aggregate(self.given(comm.rank, self.steps))  # a past of its own, which the state replaces
        results = np.empty((self.steps, self.n), np.float32 if self.dtype == "bfloat16" else self.dtype)
        for step in range(self.steps):
            if step == self.steps // 2:
                second.load_state_dict(first.state_dict())
            result = (first if step < self.steps // 2 else second).aggregate(self.given(comm.rank, step))
            results[step] = result.float().numpy() if self.dtype == "bfloat16" else result
        return results, second.state_dict()

    def check(self, topology: Topology | None, results: Vectors, states: Sequence[dict[str, Any]]) -> None:
        """Compare the ranks' results, and every rank's last state, with one process."""
        expected, kept, shares = simulated(self, topology, len(states))
        where = f"{self}, {topology}, {len(states)} ranks"
        for step, (result, want) in enumerate(zip(results, expected, strict=True)):
            np.testing.assert_array_equal(result, want, f"{where}, step {step}")
        for rank, (state, vectors) in enumerate(zip(states, kept, strict=True)):
            for name, vector in vectors.items():
                np.testing.assert_array_equal(state[name], vector, f"{where}, rank {rank}, {name}")
        for name, vector in shares.items():
            np.testing.assert_array_equal(sum(state[name] for state in states), vector, f"{where}, {name}")


Trials = Sequence[tuple[Trial, Topology | None]]


@lru_cache(maxsize=64)
def simulated(
    trial: Trial, topology: Topology | None, size: int
) -> tuple[Vectors, list[dict[str, Vectors]], dict[str, Vectors]]:
    """Return every step's result, every rank's last state, and the ranks' common state, as one process has them."""
    of = simulation(trial.options, topology, size, trial.n, trial.kind, trial.lengths, trial.vector_id)
    rows = (np.stack([trial.gradient(rank, step) for rank in range(size)]) for step in range(trial.steps))
    results = np.array([of.step(vectors) for vectors in rows])
    return results, [of.state(rank) for rank in range(size)], of.shares()


def of_each_topology(trials: Trials) -> Trials:
    """Return one trial of each topology: plans depend on the number of ranks, options and types do not."""
    return [*{topology: (trial, topology) for trial, topology in reversed(trials)}.values()]


def check_over_mpi(
    mpi_comm: MPI.Intracomm, trials: Trials, piece_bytes: int | None = ONE_BLOCK, threads: int = 1
) -> None:
    """Take every trial's steps over its topology; None is "auto". Each rank compares some of the runs."""
    numbers, mine = count(), []
    for topology, cases in groupby(trials, lambda case: case[1]):
        options: dict[str, Any] = {"piece_bytes": piece_bytes, "threads": threads}
        with Communicator(mpi_comm, topology or "auto", TIMEOUT_S, **options) as comm:
            for trial, _ in cases:
                results, state = trial.take(comm)
                digest = hashlib.sha256(results).digest()
                found = mpi_comm.gather((digest, state), next(numbers) % mpi_comm.size)
                if found is not None:
                    mine.append((trial, topology, results, found))
    for trial, topology, results, found in mine:
        digests, states = zip(*found, strict=True)
        assert len(set(digests)) == 1, (trial, topology)
        trial.check(topology, results, states)


def check_in_threads(ranks: int, trials: Trials, piece_bytes: int | None = ONE_BLOCK) -> None:
    """Do the same with ranks that are threads."""
    for trial, topology in trials:
        found = run_local(ranks, trial.take, topology or "auto", timeout=TIMEOUT_S, piece_bytes=piece_bytes)
        assert len({results.tobytes() for results, _ in found}) == 1, (trial, topology)
        trial.check(topology, found[0][0], [state for _, state in found])
