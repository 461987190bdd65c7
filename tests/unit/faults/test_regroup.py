"""Ranks that die: the survivors go on, with equal bits and no lost or doubled step; or all get one error."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

import mpicomp
from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

RANKS, STEPS, N = 4, 9, 20_000

TRAINING = """
import logging
logging.basicConfig(level=logging.WARNING)
comm = mpicomp.Communicator(on_failure="regroup", topology=TOPOLOGY, timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
aggregator = mpicomp.algorithm(METHOD, **OPTIONS).start(comm, N)
results, sizes = [], []
for step in range(STEPS):
    gradient = np.random.default_rng([me, step]).standard_normal(N).astype(np.float32)
    if step == DEATHS.get(me):
        if POLLS is not None:
            call = aggregator.begin(gradient)
            for _ in range(POLLS):
                call.poll()
        os.kill(os.getpid(), signal.SIGKILL)
    results.append(aggregator.aggregate(gradient))
    sizes.append(comm.size)
assert aggregator.step == STEPS
np.save(FOLDER / f"results-{me}.npy", results)
np.save(FOLDER / f"residual-{me}.npy", np.zeros(0) if aggregator.residual is None else aggregator.residual)
tell(f"members-{me}", comm.members)
comm.close()
"""


def gradient(rank: int, step: int) -> Any:
    return np.random.default_rng([rank, step]).standard_normal(N).astype(np.float32)


def expected(method: str, options: dict[str, Any], topology: Any, deaths: dict[int, int]) -> tuple[Any, dict[int, Any]]:
    """Return the results of all steps, and the last residuals, of threads that go on from the survivors' states."""
    ranks, states = list(range(RANKS)), dict[int, Any]()
    results = []
    for first, last in zip(sorted({0, *deaths.values()}), [*sorted(set(deaths.values()) - {0}), STEPS], strict=True):
        ranks = [rank for rank in ranks if deaths.get(rank, STEPS) > first]

        def train(
            comm: Any, ranks: list[int] = ranks, states: dict[int, Any] = states, first: int = first, last: int = last
        ) -> Any:
            me = ranks[comm.rank]
            aggregator = mpicomp.algorithm(method, **options).start(comm, N)
            if me in states:
                aggregator.load_state_dict(states[me])
            means = [aggregator.aggregate(gradient(me, step)) for step in range(first, last)]
            return me, means, aggregator.state_dict(), aggregator.residual

        ended = mpicomp.run_local(len(ranks), train, topology=topology)
        states = {me: state for me, _, state, _ in ended}
        results += ended[0][1]
    return np.array(results), {me: residual for me, _, _, residual in ended}


@pytest.mark.parametrize(
    ("method", "options", "topology"),
    [
        ("dense", {}, "ring"),
        ("marsit", {"full_precision_every": 4}, "auto"),
        ("marsit", {"full_precision_every": None, "residual": "paper"}, "ring"),
        ("relay", {}, "ring"),
        ("relay", {"levels": 3}, "auto"),
        ("local-top-k", {"rate": 10}, "auto"),
        ("qsgd", {}, "tree"),
        ("one-bit-sgd", {}, "auto"),
    ],
)
def test_survivors_go_on_from_their_residuals_to_the_bit(
    jobs: Jobs, method: str, options: dict[str, Any], topology: str
) -> None:
    deaths = {1: 2, 3: 5}
    job = jobs.run_warm(
        RANKS, TRAINING, METHOD=method, OPTIONS=options, TOPOLOGY=topology, DEATHS=deaths, POLLS=None, N=N, STEPS=STEPS
    )
    status, output = job.finish()
    assert status == 0, output
    results, residuals = expected(method, options, topology, deaths)
    for rank in (0, 2):
        assert job.told(f"members-{rank}") == "(0, 2)"
        np.testing.assert_array_equal(job.load(f"results-{rank}"), results)
        if residuals[rank] is not None:
            np.testing.assert_array_equal(job.load(f"residual-{rank}"), residuals[rank])
    assert re.search(r"rank 1 died; 3 of 4 ranks go on after \d+ ms", output)


@pytest.mark.parametrize("polls", [0, 1, 3, 10, 40])
def test_a_step_whose_rank_dies_is_that_of_all_or_of_the_survivors(jobs: Jobs, polls: int) -> None:
    job = jobs.run_warm(
        RANKS, TRAINING, METHOD="dense", OPTIONS={}, TOPOLOGY="ring", DEATHS={2: 3, 0: 6}, POLLS=polls, N=N, STEPS=STEPS
    )
    status, output = job.finish()
    assert status == 0, output
    found = [job.load(f"results-{rank}") for rank in (1, 3)]
    np.testing.assert_array_equal(*found)
    groups: list[list[int]] = [[0, 1, 2, 3]]
    for step in range(STEPS):
        if step in (3, 6):
            groups.append([rank for rank in groups[-1] if rank != {3: 2, 6: 0}[step]])
        means = [
            np.mean([gradient(rank, step) for rank in ranks], 0) for ranks in groups[-2 if step in (3, 6) else -1 :]
        ]
        assert any(np.allclose(found[0][step], mean, atol=1e-6) for mean in means), step


@pytest.mark.parametrize("method", ["double-squeeze", "scalecom"])
def test_errors_that_dead_ranks_owned_are_lost_and_no_others(jobs: Jobs, method: str) -> None:
    job = jobs.run_warm(
        RANKS, TRAINING, METHOD=method, OPTIONS={}, TOPOLOGY="auto", DEATHS={1: 4}, POLLS=None, N=N, STEPS=STEPS
    )
    status, output = job.finish()
    assert status == 0, output
    found = [job.load(f"results-{rank}") for rank in (0, 2, 3)]
    assert np.isfinite(found[0]).all()
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


WHILE_REGROUPING = """
from mpicomp.recovery import continuation
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
def die(*arguments):
    if AT == "end":
        renew(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
if me == 3:
    renew = continuation.Continuation.renew
    if AT == "exchange":
        continuation.gather_objects = die
    else:
        continuation.Continuation.renew = die
aggregator = mpicomp.DoubleSqueeze().start(comm, N)
results = []
for step in range(STEPS):
    if me == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    results.append(aggregator.aggregate(np.random.default_rng([me, step]).standard_normal(N).astype(np.float32)))
np.save(FOLDER / f"results-{me}.npy", results)
tell(f"members-{me}", comm.members)
comm.close()
"""


@pytest.mark.parametrize("at", ["beginning", "exchange", "end"])
def test_all_survivors_begin_again_if_a_rank_dies_while_they_regroup(jobs: Jobs, at: str) -> None:
    job = jobs.run_warm(5, WHILE_REGROUPING, N=N, STEPS=STEPS, AT=at)
    status, output = job.finish()
    assert status == 0, output
    found = [job.load(f"results-{rank}") for rank in (0, 2, 4)]
    for rank, other in zip((0, 2, 4), found, strict=True):
        assert job.told(f"members-{rank}") == "(0, 2, 4)"
        np.testing.assert_array_equal(found[0], other)


EXCHANGES = """
import json
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
x = np.full(100_000, 1.0 + me, np.float32)
comm.barrier()
if me == 2:
    os.kill(os.getpid(), signal.SIGKILL)
handles = [comm.iallreduce(np.full(n, 1.0 + me)) for n in (10, 50_000)]
total = comm.allreduce(x, "mean", out=x)  # a repetition must not begin from the result
found = [float(total[0]), *(float(handle.wait()[-1]) for handle in handles)]
found += [comm.allreduce(me), comm.allreduce(me, "mean")]
found += [comm.allgather_object(me), comm.allgather(np.array([me])).tolist()]
tell(f"found-{me}", json.dumps(found))
comm.close()
"""


def test_sums_in_flight_and_exchanges_are_made_again_among_the_survivors(jobs: Jobs) -> None:
    job = jobs.run_warm(4, EXCHANGES)
    status, output = job.finish()
    assert status == 0, output
    for rank in (0, 1, 3):
        mean, *others = json.loads(job.told(f"found-{rank}"))
        assert mean == pytest.approx(7 / 3)
        assert others == [7.0, 7.0, 4, pytest.approx(4 / 3), [0, 1, 3], [0, 1, 3]]


YET_TO_BE_MADE = """
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
before = mpicomp.Marsit().start(comm, N)
comm.barrier()
if me == 1:
    time.sleep(2)  # in which rank 0 makes its aggregators
    os.kill(os.getpid(), signal.SIGKILL)
vector = np.full(N, 1.0 + me, np.float32)
call = before.begin(vector)
if me == 0:  # the others regroup before they make theirs
    aggregators = [mpicomp.algorithm(method).start(comm, N) for method in METHODS]
call.wait()
if me != 0:
    aggregators = [mpicomp.algorithm(method).start(comm, N) for method in METHODS]
tell(f"found-{me}", [one.aggregate(vector).tobytes().hex() for one in aggregators])
comm.close()
"""


def test_an_aggregator_that_other_ranks_have_yet_to_make_begins_with_the_survivors(jobs: Jobs) -> None:
    job = jobs.run_warm(4, YET_TO_BE_MADE, N=1000, METHODS=("marsit", "double-squeeze", "qsgd"))
    status, output = job.finish()
    assert status == 0, output
    assert job.told("found-0") == job.told("found-2") == job.told("found-3")


DROPPED_BY_SOME = """
import json
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
aggregators = [mpicomp.algorithm(method).start(comm, N) for method in ("marsit", "double-squeeze", "local-top-k")]
results = [one.aggregate(np.random.default_rng(me).standard_normal(N).astype(np.float32)) for one in aggregators]
if me != 3:
    del aggregators[1]  # which rank 3 keeps alive, as a traceback or a cycle of references may
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for one in (aggregators[0], aggregators[-1]):
    total = one.aggregate(np.full(N, 1.0 + me, np.float32))
tell(f"found-{me}", json.dumps([comm.size, total.tobytes().hex()]))
comm.close()
"""


def test_an_aggregator_that_one_rank_alone_keeps_alive_does_not_disturb_the_others(jobs: Jobs) -> None:
    job = jobs.run_warm(4, DROPPED_BY_SOME, N=1000)
    status, output = job.finish()
    assert status == 0, output
    found = [json.loads(job.told(f"found-{rank}")) for rank in (0, 2, 3)]
    assert found[0][0] == 3
    assert found[0] == found[1] == found[2]


LOST_ROOT = """
from collectives import RanksLost
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
comm.barrier()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.broadcast(np.ones(1000), root=1)
except RanksLost as error:
    tell(f"error-{me}", f"{error} {error.members}")
tell(f"sum-{me}", comm.allreduce(1))
if me == 2:
    os.kill(os.getpid(), signal.SIGKILL)
tell(f"stop-{me}", comm.stop_requested())
comm.close()
"""


def test_a_broadcast_whose_rank_died_is_an_error_on_all_survivors_which_go_on(jobs: Jobs) -> None:
    job = jobs.run_warm(3, LOST_ROOT)
    status, output = job.finish()
    assert status == 0, output
    for rank, now in ((0, 0), (2, 1)):
        assert re.fullmatch(
            rf"rank {now} of 2: rank 1 died during broadcast\(root=1\) .*; "
            r"the survivors can make the call again \(0, 2\)",
            job.told(f"error-{rank}"),
        )
        assert job.told(f"sum-{rank}") == "2"
    assert job.told("stop-0") == "False"  # made again without rank 2


BEGUN_BY_ONE = """
from collectives import RanksLost
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
comm.barrier()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
handle = comm.iallreduce(np.ones(10))
if me == 2:
    handle.wait()  # regroups here, while rank 0 is in the broadcast
try:
    comm.broadcast(np.ones(1000), root=0)
except RanksLost:
    tell(f"sum-{me}", comm.allreduce(1))
handle.wait()
comm.close()
"""


def test_a_survivor_that_has_not_begun_a_broadcast_raises_the_error_of_those_that_have(jobs: Jobs) -> None:
    job = jobs.run_warm(3, BEGUN_BY_ONE)
    status, output = job.finish()
    assert status == 0, output
    assert [job.told(f"sum-{rank}") for rank in (0, 2)] == ["2", "2"]


CLOSING = """
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
tell(f"pid-{comm.rank}", os.getpid())
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.close()
"""


def test_survivors_close_their_communicator_though_a_rank_dies_meanwhile(jobs: Jobs) -> None:
    status, output = jobs.run_warm(3, CLOSING).finish()
    assert status == 0, output


TWO_LEVELS = """
comm = mpicomp.Communicator(on_failure="regroup", ranks_per_node=RANKS_PER_NODE, timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
aggregator = mpicomp.PerNode(METHOD).start(comm, N)
results, sizes = [], []
for step in range(STEPS):
    gradient = np.random.default_rng([me, step]).standard_normal(N).astype(np.float32)
    if step == DEATHS.get(me):
        os.kill(os.getpid(), signal.SIGKILL)
    results.append(aggregator.aggregate(gradient))
    sizes.append(comm.size)
np.save(FOLDER / f"results-{me}.npy", results)
np.save(FOLDER / f"sizes-{me}.npy", sizes)
comm.close()
"""


@pytest.mark.parametrize(
    ("method", "ranks_per_node", "deaths", "n"),
    [
        ("dense", 2, {1: 2}, N),
        ("marsit", 2, {1: 2, 2: 5}, N),  # of each node another shard's owner
        ("marsit", 2, {0: 2, 1: 2}, N),  # a whole node
        ("local-top-k", 4, {3: 3}, 300_000),  # of one node, whose ranks read each other's memory
    ],
)
def test_ranks_of_nodes_that_wait_for_a_dead_one_in_shared_memory_go_on(
    jobs: Jobs, method: str, ranks_per_node: int, deaths: dict[int, int], n: int
) -> None:
    job = jobs.run_warm(
        RANKS, TWO_LEVELS, METHOD=method, RANKS_PER_NODE=ranks_per_node, DEATHS=deaths, N=n, STEPS=STEPS
    )
    _, output = job.finish()
    alive = [rank for rank in range(RANKS) if rank not in deaths]
    found = [job.load(f"results-{rank}") for rank in alive]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other, err_msg=output)
    assert job.load(f"sizes-{alive[0]}")[-1] == len(alive)
    if method == "marsit":
        return
    for step in range(STEPS):  # exact: there is one node, or nothing is compressed
        ranks = [rank for rank in range(RANKS) if deaths.get(rank, STEPS) > step]
        mean = np.mean([np.random.default_rng([rank, step]).standard_normal(n) for rank in ranks], 0)
        np.testing.assert_allclose(found[0][step], mean, atol=1e-6)


OPTIMIZER = """
import torch
import mpicomp.torch
from apps.faults import Injector, parse_schedule
from mpi4py import MPI
torch.set_num_threads(1)
me = MPI.COMM_WORLD.rank
faults = Injector(parse_schedule(FAULTS), me)
watched = faults.installed()
watched.__enter__()
comm = mpicomp.Communicator(faults.watch(MPI.COMM_WORLD), on_failure="regroup", timeout=60)
tell(f"pid-{me}", os.getpid())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
if METHOD is None:
    optimizer = mpicomp.torch.OneBitAdam(model.parameters(), lr=0.01, warmup_steps=3, comm=comm)
else:
    optimizer = mpicomp.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        mpicomp.algorithm(METHOD), comm, bucket_mb=0.003, **OPTIONS,
    )
for step in range(12):
    faults.begin(step)
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * me + step))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
    if step == DEATHS.get(me):
        os.kill(os.getpid(), signal.SIGKILL)  # with overlap, buckets are in flight
    optimizer.step()
if getattr(optimizer, "models_differ", False):
    optimizer.synchronize()
tell(f"model-{me}", [parameter.tolist() for parameter in model.parameters()])
tell(f"members-{me}", comm.members)
comm.close()
"""


LOCAL_STEPS = {"synchronize": "updates", "local_steps": 4, "outer": (0.7, 0.6), "fragments": 2, "delay": 1}


@pytest.mark.parametrize(
    ("method", "options", "deaths"),
    [
        pytest.param("dense", {"overlap": True}, {1: 4, 3: 7}, id="overlap"),
        pytest.param("marsit", LOCAL_STEPS, {1: 4, 3: 7}, id="in local steps"),
        # one fragment is sent after steps 1, 5 and 9, the other one after steps 3 and 7
        pytest.param("marsit", LOCAL_STEPS, "kill:1:5:middle,kill:3:7:after-barrier", id="in a fragment"),
        # v is frozen in step 3
        pytest.param(None, {}, {1: 4, 3: 7}, id="behind the freeze"),
        pytest.param(None, {}, "kill:1:1:middle,kill:3:3:before-barrier", id="at the freeze"),
    ],
)
def test_optimizers_go_on_with_the_survivors_to_equal_models(
    jobs: Jobs, method: str | None, options: dict[str, Any], deaths: dict[int, int] | str
) -> None:
    pytest.importorskip("torch")
    before, within = (deaths, "") if isinstance(deaths, dict) else ({}, deaths)
    job = jobs.run_warm(RANKS, OPTIMIZER, METHOD=method, OPTIONS=options, DEATHS=before, FAULTS=within)
    _, output = job.finish()
    assert job.told("members-0") == job.told("members-2") == "(0, 2)", output
    model = job.told("model-0")
    assert "nan" not in model
    assert job.told("model-2") == model


ISLANDS = """
import torch
import mpicomp.torch
torch.set_num_threads(1)
comm = mpicomp.Communicator(on_failure="regroup", ranks_per_node=2, timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = mpicomp.torch.DistributedOptimizer(
    inner, mpicomp.algorithm(METHOD), comm, synchronize="updates", local_steps=3, islands=comm.nodes.local
)
for step in range(STEPS):
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * me + step))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
    if step == DEATHS.get(me):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    if step == STEPS - 2:  # between two synchronizations
        tell(f"local-{me}", model.weight.tolist())
tell(f"model-{me}", model.weight.tolist())
comm.close()
"""


def weights_of_islands(deaths: dict[int, int]) -> tuple[dict[int, Any], Any]:
    """Return the weights of each island before the last step, and the common ones after it, of exact means."""
    import torch

    def gradient(model: Any, rank: int, step: int) -> list[Any]:
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
        return list(torch.autograd.grad(loss, list(model.parameters())))

    models = {}
    for island in (0, 1):
        torch.manual_seed(0)
        models[island] = torch.nn.Linear(16, 4)
    inner = {island: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for island, model in models.items()}
    local = {}
    for step in range(STEPS):
        alive = {one: [rank for rank in (2 * one, 2 * one + 1) if deaths.get(rank, STEPS) > step] for one in (0, 1)}
        for island, ranks in alive.items():
            if ranks:
                everyones = zip(*(gradient(models[island], rank, step) for rank in ranks), strict=True)
                for parameter, parts in zip(models[island].parameters(), everyones, strict=True):
                    parameter.grad = torch.stack(parts).mean(0)
                inner[island].step()
        if step == STEPS - 2:
            local = {one: models[one].weight.tolist() for one in (0, 1) if alive[one]}
        if step % 3 == 2:
            n_alive = sum(map(len, alive.values()))
            with torch.no_grad():
                for parts in zip(*(model.parameters() for model in models.values()), strict=True):
                    mean = sum(len(alive[one]) * part for one, part in enumerate(parts)) / n_alive
                    for part in parts:
                        part.copy_(mean)
    return local, models[0].weight.tolist()


@pytest.mark.parametrize("deaths", [{1: 4}, {2: 4, 3: 4}, {0: 2, 3: 6}], ids=str)
def test_islands_go_on_with_the_ranks_that_they_have_left(jobs: Jobs, deaths: dict[int, int]) -> None:
    pytest.importorskip("torch")
    job = jobs.run_warm(RANKS, ISLANDS, METHOD="dense", DEATHS=deaths, STEPS=STEPS)
    status, output = job.finish()
    assert status == 0, output
    local, common = weights_of_islands(deaths)
    for rank in set(range(RANKS)) - set(deaths):
        np.testing.assert_allclose(json.loads(job.told(f"local-{rank}")), local[rank // 2], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(json.loads(job.told(f"model-{rank}")), common, rtol=1e-4, atol=1e-6)


def test_replicas_stay_equal_where_islands_vote_and_lose_ranks(jobs: Jobs) -> None:
    pytest.importorskip("torch")
    job = jobs.run_warm(RANKS, ISLANDS, METHOD="marsit", DEATHS={1: 4, 2: 7}, STEPS=STEPS)
    status, output = job.finish()
    assert status == 0, output
    assert job.told("model-0") == job.told("model-3")


HANDLERS = """
import atexit
atexit.register(lambda: (FOLDER / f"handler-{me}").open("a").write("x"))
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
comm.barrier()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
"""


def test_exit_handlers_of_survivors_run_once(jobs: Jobs) -> None:
    job = jobs.run_tolerant(3, HANDLERS)
    status, output = job.finish()
    assert status == 0, output
    assert [(job.folder / f"handler-{rank}").read_text() for rank in (0, 2)] == ["x", "x"]


RAISING = """
with mpicomp.Communicator(on_failure="regroup", timeout=60) as comm:
    tell(f"pid-{comm.rank}", os.getpid())
    before = comm.rank
    for step in range(3):
        if step == 1 and before in RANKS:
            raise ValueError(f"bad data of rank {before}")
        comm.allreduce(np.ones(1000))
    tell(f"members-{before}", comm.members)
"""


def test_survivors_of_an_uncaught_exception_go_on_and_the_launcher_fails(jobs: Jobs) -> None:
    job = jobs.run_tolerant(3, RAISING, RANKS=(1,))
    status, output = job.finish()
    assert status == 1, output
    assert "ValueError: bad data of rank 1" in output
    assert [job.told(f"members-{rank}") for rank in (0, 2)] == ["(0, 2)"] * 2


def test_a_job_all_of_whose_ranks_raise_ends_with_a_failure(jobs: Jobs) -> None:
    status, output = jobs.run_tolerant(2, RAISING, RANKS=(0, 1)).finish()
    assert status == 1, output
    assert "ValueError: bad data of rank" in output


RAISING_LATER = """
comm = mpicomp.Communicator(on_failure="regroup", ranks_per_node=2, timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
comm.nodes
comm.barrier()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
tell(f"sum-{me}", comm.allreduce(1))
raise ValueError(f"bad data of rank {me}")
"""


def test_a_job_all_of_whose_survivors_raise_ends_with_a_failure(jobs: Jobs) -> None:
    job = jobs.run_tolerant(3, RAISING_LATER)
    status, output = job.finish()
    assert status == 1, output
    assert [job.told(f"sum-{rank}") for rank in (0, 2)] == ["2", "2"]


RAISING_BEHIND_A_GROUP = """
from collectives import PeerFailure
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
group = comm.split(0)
group.barrier()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.barrier()
except PeerFailure:
    tell(f"sum-{me}", comm.allreduce(1))
if me == 2:
    raise ValueError("bad data of rank 2")
comm.barrier()
tell(f"members-{me}", comm.members)
"""


def test_an_uncaught_exception_is_a_death_though_a_group_has_failed_before(jobs: Jobs) -> None:
    job = jobs.run_tolerant(3, RAISING_BEHIND_A_GROUP)
    status, output = job.finish()
    assert status == 1, output
    assert [job.told(f"sum-{rank}") for rank in (0, 2)] == ["2", "2"]
    assert job.told("members-0") == "(0,)"


TOO_FEW = """
from collectives import PeerFailure, Torus
comm = mpicomp.Communicator(on_failure="regroup", topology=Torus(2, 2), timeout=60)
tell(f"pid-{comm.rank}", os.getpid())
me = comm.rank
comm.barrier()
if me == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.allreduce(np.ones(100_000))
except PeerFailure as error:
    tell(f"error-{me}", error)
"""


def test_survivors_too_few_for_the_topology_get_one_error(jobs: Jobs) -> None:
    job = jobs.run_warm(4, TOO_FEW)
    job.finish()
    for rank in range(3):
        assert re.match(
            rf"rank {rank} of 4: rank 3 died, and the survivors cannot go on: .*2 x 2.*", job.told(f"error-{rank}")
        ), rank


def test_a_launcher_without_fault_tolerance_is_refused_with_the_cure(jobs: Jobs) -> None:
    job = jobs.run(2, "mpicomp.Communicator(on_failure='regroup')")
    status, output = job.finish()
    assert status != 0
    assert (
        "on_failure='regroup' needs an MPI whose ranks outlive others: start the job by `mpirun --with-ft ulfm`"
        in output
    )


GROUPS_AFTER_A_DEATH = """
comm = mpicomp.Communicator(on_failure="regroup", ranks_per_node=2, timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
comm.barrier()
if me == 3:
    os.kill(os.getpid(), signal.SIGKILL)
late_s = 2.0 if me == 0 else 0.0  # long enough for the others to look for ranks that have died
tell(f"sum-{me}", comm.allreduce(1))
time.sleep(late_s)
group = comm.split(0)
time.sleep(late_s)
tell(f"group-{me}", group.allreduce(1))
time.sleep(late_s)
tell(f"nodes-{me}", comm.nodes.sizes)
time.sleep(late_s)
tell(f"across-{me}", comm.nodes.across.allreduce(1))
group.close()
comm.close()
"""


def test_groups_that_are_made_after_a_death_wait_for_late_ranks(jobs: Jobs) -> None:
    job = jobs.run_warm(4, GROUPS_AFTER_A_DEATH)
    status, output = job.finish()
    assert status == 0, output
    for name, expected in (("group", ["3", "3", "3"]), ("nodes", ["(2, 1)"] * 3), ("across", ["2", "1", "2"])):
        assert [job.told(f"{name}-{rank}") for rank in (0, 1, 2)] == expected


DEATH_WHILE_NODES_ARE_MADE = """
comm = mpicomp.Communicator(on_failure="regroup", ranks_per_node=2, timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
comm.barrier()
make, made = mpicomp.Communicator._of_part, 0
def die(*arguments):
    global made
    made += 1
    if made == NUMBER:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(*arguments)
if me == 1:
    mpicomp.Communicator._of_part = die
for _ in range(2):
    tell(f"sizes-{me}", comm.nodes.sizes)
    comm.barrier()
tell(f"sum-{me}", comm.nodes.across.allreduce(comm.nodes.local.allreduce(1)))
comm.close()
"""


@pytest.mark.parametrize("number", [1, 2])
def test_survivors_make_the_nodes_again_if_a_rank_dies_while_they_do(jobs: Jobs, number: int) -> None:
    job = jobs.run_warm(4, DEATH_WHILE_NODES_ARE_MADE, NUMBER=number)
    status, output = job.finish()
    assert status == 0, output
    assert [job.told(f"sizes-{rank}") for rank in (0, 2, 3)] == ["(1, 2)"] * 3
    assert [job.told(f"sum-{rank}") for rank in (0, 2, 3)] == ["3", "3", "2"]


NODES_AFTER_DEATHS = """
from collectives import PeerFailure
comm = mpicomp.Communicator(on_failure="regroup", ranks_per_node=PER_NODE, timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
def die(at, step):
    if DEATHS.get(me) == (at, step):
        os.kill(os.getpid(), signal.SIGKILL)
for step in range(4):
    die("before", step)
    while True:
        is_done = 1
        try:
            nodes = comm.nodes
            die("read", step)
            in_node = nodes.local.allreduce(1)
            die("local", step)
            total = nodes.across.allreduce(in_node)
            die("across", step)
        except PeerFailure:
            is_done = 0
        if comm.allreduce(is_done, "min"):
            break
tell(f"nodes-{me}", (comm.nodes.sizes, comm.nodes.local.rank, in_node, total))
comm.close()
"""


@pytest.mark.parametrize(
    ("ranks", "per_node", "deaths"),
    [
        (4, 2, {1: ("before", 0)}),
        (4, 2, {0: ("read", 1)}),
        (4, 2, {2: ("local", 1)}),
        (4, 2, {3: ("across", 2)}),
        (4, 2, {2: ("local", 1), 3: ("local", 1)}),
        (5, 2, {4: ("read", 1)}),
        (6, 3, {0: ("local", 1), 4: ("across", 1)}),
        (4, 2, {0: ("before", 1), 2: ("read", 2), 3: ("local", 3)}),
        (5, 3, {1: ("before", 2), 3: ("read", 1)}),
    ],
    ids=str,
)
def test_nodes_are_those_of_the_survivors_wherever_ranks_die(
    jobs: Jobs, ranks: int, per_node: int, deaths: dict[int, tuple[str, int]]
) -> None:
    job = jobs.run_warm(ranks, NODES_AFTER_DEATHS, PER_NODE=per_node, DEATHS=deaths)
    status, output = job.finish()
    assert status == 0, output
    everywhere = [[*range(first, min(ranks, first + per_node))] for first in range(0, ranks, per_node)]
    alive = [[rank for rank in node if rank not in deaths] for node in everywhere]
    nodes = [node for node in alive if node]
    for node in nodes:
        for place, rank in enumerate(node):
            total = sum(len(other) for other in nodes if len(other) > place)
            expected = tuple(map(len, nodes)), place, len(node), total
            assert job.told(f"nodes-{rank}") == str(expected), output


CLOSED_NODES = """
comm = mpicomp.Communicator(on_failure="regroup", ranks_per_node=2, timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
comm.nodes.close() if WHOLE else comm.nodes.across.close()
comm.barrier()
if me == DEAD:
    os.kill(os.getpid(), signal.SIGKILL)
tell(f"sum-{me}", comm.allreduce(1))
comm.close()
"""


@pytest.mark.parametrize("dead", [None, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_communicators_close_whose_nodes_were_closed_before(jobs: Jobs, whole: bool, dead: int | None) -> None:
    job = jobs.run_warm(4, CLOSED_NODES, WHOLE=whole, DEAD=dead)
    status, output = job.finish()
    assert status == 0, output
    survivors = [rank for rank in range(4) if rank != dead]
    assert {job.told(f"sum-{rank}") for rank in survivors} == {str(len(survivors))}, output


DEATH_IN_SPLIT = """
from collectives import RanksLost
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
comm.barrier()
if me == 1:
    mpicomp.Communicator._of_part = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.split(me % 2)
except RanksLost as error:
    tell(f"lost-{me}", error.members)
with comm.split(0) as part:
    tell(f"sum-{me}", part.allreduce(1))
comm.close()
"""


def test_a_death_in_split_is_raised_on_all_survivors_those_of_other_parts_included(jobs: Jobs) -> None:
    job = jobs.run_warm(4, DEATH_IN_SPLIT)
    status, output = job.finish()
    assert status == 0, output
    assert [job.told(f"lost-{rank}") for rank in (0, 2, 3)] == ["(0, 2, 3)"] * 3
    assert [job.told(f"sum-{rank}") for rank in (0, 2, 3)] == ["3"] * 3


ERRORS_IN_SPLIT = """
from collectives import CommunicatorClosed, RanksLost, Torus
comm = mpicomp.Communicator(on_failure="regroup", topology="ring", timeout=60)
me = comm.rank
tell(f"pid-{me}", os.getpid())
try:  # a torus of two on one rank, and on two
    comm.split(int(me == 0), topology=Torus(2, 1)).close()
except ValueError as error:
    tell(f"misfit-{me}", type(error).__name__)
tell(f"sum-{me}", comm.allreduce(1))
if me == 1:
    def fail(*arguments):
        raise MemoryError("no memory here")
    mpicomp.Communicator._of_part = fail
start = time.monotonic()
try:
    comm.split(0)
except (MemoryError, CommunicatorClosed, mpicomp.CollectiveError) as error:
    tell(f"end-{me}", f"{type(error).__name__} {time.monotonic() - start < 30}")
"""


def test_errors_of_some_ranks_in_split_reach_all_of_them(jobs: Jobs) -> None:
    job = jobs.run_warm(3, ERRORS_IN_SPLIT)
    _, output = job.finish()
    assert job.told("misfit-0") == "TopologyError", output
    assert [job.told(f"sum-{rank}") for rank in range(3)] == ["3"] * 3
    ends = [job.told(f"end-{rank}") for rank in range(3)]
    assert ends[1] == "MemoryError True"
    assert all(end.endswith(" True") for end in ends), ends
