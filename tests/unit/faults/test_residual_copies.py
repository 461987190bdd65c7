"""Ranks that die with a copy of their residual elsewhere: a survivor goes on with both, and the sum stays."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mpicomp
from tests.unit.faults.jobs import JOB_S, Job, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

RANKS, STEPS, N = 4, 8, 5_000

TRAINING = """
import logging
logging.basicConfig(level=logging.WARNING)
comm = mpicomp.Communicator(on_failure="regroup", topology="ring", timeout=60, copy_residuals_every=EVERY)
me = comm.rank
tell(f"pid-{me}", os.getpid())
aggregator = mpicomp.algorithm(METHOD, **OPTIONS).start(comm, N)
results = []
for step in range(STEPS):
    gradient = np.random.default_rng([me, step]).standard_normal(N).astype(np.float32)
    if step == DEATHS.get(me):
        if POLLS is not None:
            call = aggregator.begin(gradient)
            for _ in range(POLLS):
                call.poll()
        os.kill(os.getpid(), signal.SIGKILL)
    results.append(aggregator.aggregate(gradient))
np.save(FOLDER / f"results-{me}.npy", results)
np.save(FOLDER / f"residual-{me}.npy", aggregator.residual)
comm.close()
"""


def gradient(rank: int, step: int) -> Any:
    return np.random.default_rng([rank, step]).standard_normal(N).astype(np.float32)


def run(
    jobs: Jobs, method: str, options: dict[str, Any], every: int, deaths: dict[int, int], polls: int | None
) -> tuple[Job, list[int]]:
    """Return a job that has ended, and the survivors; their results are equal."""
    constants = {"METHOD": method, "OPTIONS": options, "EVERY": every, "DEATHS": deaths, "POLLS": polls}
    job = jobs.run_tolerant(RANKS, TRAINING, N=N, STEPS=STEPS, **constants)
    status, output = job.finish()
    assert status == 0, output
    alive = [rank for rank in range(RANKS) if rank not in deaths]
    for rank in alive[1:]:
        np.testing.assert_array_equal(*(np.load(job.folder / f"results-{one}.npy") for one in (alive[0], rank)))
    return job, alive


def expected(method: str, options: dict[str, Any], every: int, deaths: dict[int, int]) -> tuple[Any, dict[int, Any]]:
    """Return all results and the last residuals of threads, whose ranks take over copies as the survivors should."""
    ranks, states, results = list(range(RANKS)), dict[int, Any](), list[Any]()
    ends = sorted({*deaths.values(), STEPS})
    for first, last in zip([0, *ends], ends, strict=False):

        def train(comm: Any, ranks: list[int] = ranks, first: int = first, last: int = last) -> Any:
            me = ranks[comm.rank]
            aggregator = mpicomp.algorithm(method, **options).start(comm, N)
            if me in states:
                aggregator.load_state_dict(states[me])
            copy, means = aggregator.state_dict(), []
            for step in range(first, last):
                means.append(aggregator.aggregate(gradient(me, step)))
                copy = aggregator.state_dict() if aggregator.step % every == 0 else copy
            return aggregator.state_dict(), copy, means

        ended = mpicomp.run_local(len(ranks), train, topology="ring")
        results += ended[0][2]
        states = {me: state for me, (state, _, _) in zip(ranks, ended, strict=True)}
        alive = [rank for rank in ranks if deaths.get(rank, STEPS + 1) > last]
        for place, rank in enumerate(ranks):
            heir = ranks[(place + 1) % len(ranks)]
            if rank not in alive and heir in alive:
                states[heir]["residual"] = states[heir]["residual"] + ended[place][1]["residual"]
        ranks = alive
    return np.array(results), {rank: states[rank]["residual"] for rank in ranks}


@pytest.mark.parametrize(
    ("method", "options", "every", "deaths", "reported"),
    [
        (
            "local-top-k",
            {"rate": 10},
            1,
            {1: 2, 3: 5},
            ["with the residual of rank 1$", "with the residual of rank 3$"],
        ),
        ("marsit", {"full_precision_every": None}, 3, {2: 5}, ["with the residual of rank 2 of 2 steps before$"]),
        ("local-top-k", {"rate": 10}, 1, {1: 4, 2: 4}, []),  # the second death may come while the survivors regroup
    ],
)
def test_a_survivor_adds_the_copy_of_a_dead_ranks_residual_to_its_own_to_the_bit(
    jobs: Jobs, method: str, options: dict[str, Any], every: int, deaths: dict[int, int], reported: list[str]
) -> None:
    job, alive = run(jobs, method, options, every, deaths, None)
    if not reported:
        assert re.search("without the residual of rank|with the residual of rank 1, with the residual", job.output)
        return
    results, residuals = expected(method, options, every, deaths)
    for rank in alive:
        np.testing.assert_array_equal(np.load(job.folder / f"results-{rank}.npy"), results)
        np.testing.assert_array_equal(np.load(job.folder / f"residual-{rank}.npy"), residuals[rank])
    for text in reported:
        assert re.search(text, job.output, re.MULTILINE), job.output


@pytest.mark.parametrize("polls", [1, 12])
def test_no_error_is_lost_or_counted_twice_if_a_rank_dies_within_a_step(jobs: Jobs, polls: int) -> None:
    job, alive = run(jobs, "local-top-k", {"rate": 10}, 1, {2: 4}, polls)
    results = np.load(job.folder / f"results-{alive[0]}.npy").astype(np.float64)
    pending = np.sum([np.load(job.folder / f"residual-{rank}.npy") for rank in alive], 0)
    sums = []
    for last in (3, 4):  # the last step with the dead rank
        groups = [range(RANKS) if step <= last else alive for step in range(STEPS)]
        applied = np.sum([len(group) * result for group, result in zip(groups, results, strict=True)], 0)
        given = np.sum([gradient(rank, step) for step, group in enumerate(groups) for rank in group], 0)
        sums.append(np.abs(given - applied - pending).max())
    assert min(sums) < 1e-4 < max(sums)
