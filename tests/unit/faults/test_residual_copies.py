"""Ranks that die with a copy of their residual elsewhere: a survivor goes on with both, and the sum stays."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mpicomp
from collectives.execution.traffic import Traffic
from collectives.progress.polling import Backoff, Limits, drive
from mpicomp.recovery.residual_copies import ResidualCopies, ResidualCopy, ages_of, buddies_of, with_copy
from mpicomp.state.redistribute import among_survivors
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
    job = jobs.run_warm(RANKS, TRAINING, N=N, STEPS=STEPS, **constants)
    status, output = job.finish()
    assert status == 0, output
    alive = [rank for rank in range(RANKS) if rank not in deaths]
    for rank in alive[1:]:
        np.testing.assert_array_equal(*(job.load(f"results-{one}") for one in (alive[0], rank)))
    return job, alive


def expected(method: str, options: dict[str, Any], every: int, deaths: dict[int, int]) -> tuple[Any, dict[int, Any]]:
    """Return all results and the last residuals of threads, whose ranks take over copies as the survivors should."""
    ranks, states, results = list(range(RANKS)), dict[int, Any](), list[Any]()
    ends = sorted({*deaths.values(), STEPS})
    for first, last in zip([0, *ends], ends, strict=False):

        def train(
            comm: Any, ranks: list[int] = ranks, states: dict[int, Any] = states, first: int = first, last: int = last
        ) -> Any:
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
        ("relay", {}, 1, {1: 2}, ["with the residual of rank 1$"]),
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
        np.testing.assert_array_equal(job.load(f"results-{rank}"), results)
        np.testing.assert_array_equal(job.load(f"residual-{rank}"), residuals[rank])
    for text in reported:
        assert re.search(text, job.output, re.MULTILINE), job.output


def test_methods_whose_owners_keep_no_errors_go_on_with_copies(jobs: Jobs) -> None:
    job, _ = run(jobs, "mem-sgd", {}, 1, {1: 2}, None)
    assert re.search("with the residual of rank 1$", job.output, re.MULTILINE), job.output


@pytest.mark.parametrize("polls", [1, 12])
def test_no_error_is_lost_or_counted_twice_if_a_rank_dies_within_a_step(jobs: Jobs, polls: int) -> None:
    job, alive = run(jobs, "local-top-k", {"rate": 10}, 1, {2: 4}, polls)
    results = job.load(f"results-{alive[0]}").astype(np.float64)
    pending = np.sum([job.load(f"residual-{rank}") for rank in alive], 0)
    sums = []
    for last in (3, 4):  # the last step with the dead rank
        groups = [range(RANKS) if step <= last else alive for step in range(STEPS)]
        applied = np.sum([len(group) * result for group, result in zip(groups, results, strict=True)], 0)
        given = np.sum([gradient(rank, step) for step, group in enumerate(groups) for rank in group], 0)
        sums.append(np.abs(given - applied - pending).max())
    assert min(sums) < 1e-4 < max(sums)


# Parts, without deaths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node_of", "apart"), [([0] * 5, 0), ([0, 0, 1, 1], 4), ([0, 1, 0, 1, 2], 5), ([0, 0, 0, 1], 2), ([0, 1, 2], 3)]
)
def test_each_rank_keeps_one_copy_and_of_another_node_where_that_is_possible(node_of: list[int], apart: int) -> None:
    buddies = buddies_of(node_of)
    assert sorted(buddies) == list(range(len(node_of)))
    assert all(rank != buddy for rank, buddy in enumerate(buddies))
    assert sum(node_of[rank] != node_of[buddy] for rank, buddy in enumerate(buddies)) == apart


def test_a_copy_is_held_once_the_step_has_ended_and_is_forgotten_with_a_step_that_fails() -> None:
    def work(comm: Any) -> Any:
        copies, traffic = ResidualCopies(comm, 2, ["residual"]), Traffic()
        found = []
        for step, end in ((2, copies.keep), (4, copies.drop)):
            backoff = Backoff(Limits(20.0), lambda: "no copy")
            state = {"residual": np.full(3, 10.0 * comm.rank + step, np.float32)}
            drive(copies.exchange(state, step, 7, backoff, traffic), backoff)
            end()
            assert copies.held is not None
            assert copies.held.entries is not None
            found.append((copies.held.rank, copies.held.step, copies.held.entries["residual"].tolist()))
        return found, traffic.bytes_sent

    assert mpicomp.run_local(3, work)[0] == ([(2, 2, [22.0] * 3)] * 2, 24)


def test_copies_of_steps_that_were_taken_back_are_lost() -> None:
    state = {"residual": np.ones(2, np.float32), "step": 4}
    copy = ResidualCopy(1, 5, {"residual": np.ones(2, np.float32)})
    kinds: Any = {"residual": "mean", "step": "shared"}
    assert with_copy(state, copy, [1], kinds).state is state
    assert ages_of([(1, 5), (2, 4)], [1, 2], 4) == {1: None, 2: 0}
    assert with_copy(state, copy._replace(step=4), [1], kinds).state["residual"].tolist() == [2.0, 2.0]


def test_errors_of_a_dead_owner_are_kept_and_the_mean_stays_that_of_the_survivors() -> None:
    kinds: Any = {"n": "shared", "mine": "mean", "owners": "owner", "owned": "owned"}
    states: list[Any] = [
        {
            "n": 6,
            "mine": np.full(6, 3.0 * rank, np.float32),
            "owners": np.where(np.arange(6) // 2 == rank, 1.0 + rank, 0).astype(np.float32),
            "owned": np.array([2 * rank, 2 * rank + 2]),
        }
        for rank in range(3)
    ]
    kept = among_survivors(states[:2], kinds, None, states[2:])
    lost = among_survivors(states[:2], kinds, None)
    assert kept["mine"].tolist() == lost["mine"].tolist() == [1.5] * 6
    assert kept["owners"].tolist() == [1, 1, 2, 2, 3, 3]
    assert lost["owners"].tolist() == [1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("every", "error", "text"),
    [
        (0, ValueError, "at least 1, not 0"),
        (2.5, TypeError, "number of steps or None, not 2.5"),
        (2, ValueError, "pass both"),
    ],
)
def test_copies_that_cannot_be_made_are_refused(every: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"copy_residuals_every .*{text}"):
        mpicomp.Communicator(copy_residuals_every=every)
