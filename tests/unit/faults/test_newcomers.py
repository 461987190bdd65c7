"""Ranks that wait take the places of dead ones between two steps, with the members' model and no pending error."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import mpicomp
from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

TRAINING = """
import json, logging, zlib
logging.basicConfig(level=logging.WARNING)
from mpi4py import MPI
from collectives.recovery import state_transfer
from collectives.recovery.newcomers import newcomers_of
from mpicomp.recovery import continuation
me = MPI.COMM_WORLD.rank
tell(f"pid-{me}", os.getpid())
comm = mpicomp.Communicator(on_failure="regroup", spares=SPARES, timeout=60, **COMM)
aggregator = mpicomp.algorithm(METHOD).start(comm, N if me != OTHER else N + 1)
model, step = np.zeros(N, np.float32), 0
if me == DIES_JOINING:
    def die(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)
    continuation.Continuation.renew = die
state_transfer.PIECE_BYTES, state_transfer.LONG_BYTES = PIECES
waits = 0
def wait(*arguments, before=state_transfer.wait):
    global waits
    waits += 1
    if waits == 6:  # of two in each round, for a piece and the other ranks
        os.kill(os.getpid(), signal.SIGKILL)
    before(*arguments)
if me == DIES_SENDING:
    state_transfer.wait = wait
def state():
    return {"model": model, "step": step}
def load(saved):
    global model, step
    model, step = saved["model"], saved["step"]
rows = []
while step < STEPS:
    joined = comm.admit(state, load)
    # until the ranks that wait have loaded their modules
    while comm.size < N_MEMBERS and newcomers_of(comm).waiting:
        joined = comm.admit(state, load)
    if joined and me >= N_MEMBERS and not rows:
        pending = float(np.abs(aggregator.residual).sum()) if aggregator.residual is not None else 0.0
        tell(f"joined-{me}", json.dumps([step, aggregator.step, pending]))
    if DEATHS.get(me) == step:
        os.kill(os.getpid(), signal.SIGKILL)
    mean = aggregator.aggregate(np.full(N, 1.0 + me, np.float32) + np.arange(N, dtype=np.float32) / N)
    model = model - mean
    step += 1
    rows.append([step, comm.size, float(mean[0]), zlib.crc32(model.tobytes()), list(comm.members)])
assert aggregator.step == STEPS
tell(f"rows-{me}", json.dumps(rows))
comm.close()
"""


def train(jobs: Jobs, ranks: int, spares: int, deaths: dict[int, int], method: str = "dense", **given: Any) -> Any:
    constants: dict[str, Any] = {"OTHER": None, "DIES_JOINING": None, "DIES_SENDING": None, "STEPS": 12, "COMM": {}}
    constants |= {"N_MEMBERS": ranks - spares, "N": 1000, "PIECES": (1000, 100), **given}
    job = jobs.run_warm(ranks, TRAINING, SPARES=spares, DEATHS=deaths, METHOD=method, **constants)
    return job, *job.finish()


def rows_of(job: Any, rank: int) -> dict[int, Any]:
    return {step: row for step, *row in json.loads(job.told(f"rows-{rank}"))}


@pytest.mark.parametrize("method", ["marsit", "double-squeeze"])
def test_newcomers_go_on_from_the_model_of_the_members_to_the_bit(jobs: Jobs, method: str) -> None:
    job, status, output = train(jobs, 4, 2, {1: 2, 0: 6}, method)
    assert status == 0, output
    rows = {rank: rows_of(job, rank) for rank in (2, 3)}
    assert rows[2][12][-1] == [2, 3]
    for rank in (2, 3):
        assert set(rows[rank]) == set(range(min(rows[rank]), 13))
        for step, row in rows[rank].items():
            assert row == rows[2][step], (rank, step)  # rank 2 has joined first
        step, counted, pending = json.loads(job.told(f"joined-{rank}"))
        assert step == counted == min(rows[rank]) - 1
        assert (pending == 0.0) == (method == "marsit")  # with owners the ranks share all errors
    assert re.search(r"rank 3 joined; 2 ranks go on after \d+ ms", output)


@pytest.mark.parametrize("method", ["marsit", "double-squeeze"])
def test_newcomers_of_another_node_take_the_places_of_a_whole_one(jobs: Jobs, method: str) -> None:
    deaths = {0: 2, 1: 2, 2: 7}  # the first node, and later a rank that the newcomers have joined
    job, status, output = train(jobs, 6, 2, deaths, method, COMM={"ranks_per_node": 2, "checksums": True})
    assert status == 0, output
    rows = {rank: rows_of(job, rank) for rank in (3, 4, 5)}
    assert (rows[3][7][-1], rows[3][12][-1]) == ([2, 3, 4, 5], [3, 4, 5])
    for rank in (4, 5):
        for step, row in rows[rank].items():
            assert row == rows[3][step], (rank, step)
        assert min(rows[rank]) == 4


def test_members_go_on_without_a_newcomer_that_dies_or_has_another_model(jobs: Jobs) -> None:
    job, _, output = train(jobs, 5, 3, {1: 2}, OTHER=3, DIES_JOINING=2)
    rows = {rank: rows_of(job, rank) for rank in (0, 4)}
    assert rows[0][12][-1] == [0, 4], output
    assert rows[0][12][1] == pytest.approx(1 + 4 / 2)  # divided by the new number of ranks
    for step, row in rows[4].items():
        assert row == rows[0][step]
    assert re.search(r"ValueError: rank 3 of the job cannot join: its aggregators differ .*float32\[1001\]", output)
    assert re.search(r"rank 3 of the job cannot join, and the others go on", output)


@pytest.mark.parametrize(("dies", "left"), [(0, [2, 3, 4]), (3, [0, 2, 4])])
def test_a_death_between_two_pieces_of_a_state_begins_the_admission_again(
    jobs: Jobs, dies: int, left: list[int]
) -> None:
    job, status, output = train(jobs, 5, 2, {1: 2}, DIES_SENDING=dies)
    assert status == 0, output
    rows = {rank: rows_of(job, rank) for rank in left}
    assert rows[2 if dies == 0 else 0][12][-1] == left
    for rank in left:
        for step, row in rows[rank].items():
            assert row == rows[left[0]][step], (rank, step)


def test_ranks_that_nobody_needs_end_with_the_job(jobs: Jobs) -> None:
    job, status, output = train(jobs, 2, 1, {})
    assert status == 0, output
    assert rows_of(job, 0)[12][0] == 1


WITHOUT_CLOSE = """
comm = mpicomp.Communicator(on_failure="regroup", spares=1, timeout=60)
comm.admit(lambda: 0, print)
tell("trained")
"""


def test_ranks_that_nobody_needs_end_with_a_program_that_closes_nothing(jobs: Jobs) -> None:
    job = jobs.run_tolerant(2, WITHOUT_CLOSE)
    status, output = job.finish()
    assert (status, job.told("trained")) == (0, ""), output


OPTIMIZER = """
import torch
import mpicomp.torch
from mpi4py import MPI
from mpicomp.torch.synchronizer import synchronizer
synchronizer.COMPARE_EVERY = 4  # a newcomer compares the models in the same steps as the members
me = MPI.COMM_WORLD.rank
tell(f"pid-{me}", os.getpid())
torch.set_num_threads(1)
comm = mpicomp.Communicator(on_failure="regroup", spares=1, timeout=60)
torch.manual_seed(me if me == 2 else 0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
if WARMUP_STEPS is None:
    optimizer = mpicomp.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), mpicomp.LocalTopK(), comm, bucket_mb=0.003
    )
else:
    optimizer = mpicomp.torch.OneBitAdam(
        model.parameters(), lr=0.01, warmup_steps=WARMUP_STEPS, comm=comm, bucket_mb=0.003
    )
step = 0
def load(saved):
    global step
    step = saved
while step < 12:
    optimizer.admit(model, lambda: step, load)
    while step == 5 and comm.size < 2:
        optimizer.admit(model, lambda: step, load)
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * me + step))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
    if me == 1 and step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    step += 1
tell(f"model-{me}", [parameter.tolist() for parameter in model.parameters()])
tell(f"members-{me}", comm.members)
comm.close()
"""


@pytest.mark.parametrize("warmup_steps", [None, 3, 8])  # of OneBitAdam: joining behind the warm-up, and in it
def test_optimizers_copy_model_and_state_to_a_newcomer(jobs: Jobs, warmup_steps: int | None) -> None:
    pytest.importorskip("torch")
    job = jobs.run_warm(3, OPTIMIZER, WARMUP_STEPS=warmup_steps)
    _, output = job.finish()
    assert job.told("members-0") == job.told("members-2") == "(0, 2)", output
    assert job.told("model-0") == job.told("model-2")


LOADING = """
from mpi4py import MPI
from mpicomp.kernels.cpu.kernel import _KernelCache
loaded = []
def load_overload(self, signature, context, before=_KernelCache.load_overload):
    loaded.append(self.file_of(signature))
    return before(self, signature, context)
_KernelCache.load_overload = load_overload
me, step, before_joining = MPI.COMM_WORLD.rank, 0, 0
comm = mpicomp.Communicator(on_failure="regroup", spares=1, timeout=60)
if WITH_TORCH:
    import torch, mpicomp.torch; torch.manual_seed(0)
    model = torch.nn.Linear(1000, 1)
    optimizer = mpicomp.torch.DistributedOptimizer(torch.optim.SGD(model.parameters()), mpicomp.LocalTopK(), comm)
    def make_step():
        model(torch.full((1, 1000), 1.0 + step)).backward()
        optimizer.step()
    admit = lambda *functions: optimizer.admit(model, *functions)
else:
    aggregator = mpicomp.Marsit().start(comm, 1000)
    make_step = lambda: aggregator.aggregate(np.full(1000, 1.0 + step, np.float32))
    admit = comm.admit
def load(saved):
    global step, before_joining
    step, before_joining = saved, len(loaded)
while step < 6:
    while not admit(lambda: step, load) and step == 3 and comm.size < 2:
        pass
    if step == 2 and me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    make_step()
    step += 1
tell(f"loaded-{me}", loaded[:before_joining])
tell(f"loaded-late-{me}", loaded[before_joining:])
comm.close()
"""


@pytest.mark.parametrize("with_torch", [False, True])
def test_a_rank_that_waits_has_loaded_the_kernels_of_its_first_step(jobs: Jobs, with_torch: bool) -> None:
    if with_torch:
        pytest.importorskip("torch")
    job = jobs.run_tolerant(3, LOADING, WITH_TORCH=with_torch)
    _, output = job.finish()
    assert job.told("loaded-late-2") == "[]", output
    assert job.told("loaded-2") != "[]"


@pytest.mark.parametrize(
    ("given", "message"), [(1, r"must lie in 0 \.\. 0, since a rank has to train"), (True, "whole number")]
)
def test_numbers_of_ranks_that_wait_are_checked(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        mpicomp.Communicator(spares=given, alone=True)


FAILING = """
from mpi4py import MPI
me, step = MPI.COMM_WORLD.rank, 0
comm = mpicomp.Communicator(on_failure="regroup", spares=SPARES)
if me == FAILING_SPARE:
    comm.close()
    sys.exit(1)
def load(saved):
    global step
    step = saved
while step < 5 or comm.size < 2:
    comm.admit(lambda: step, load)
    comm.barrier()
    step += 1
    if step == 4 and me in DEAD:
        float("one") if RAISES else os.kill(os.getpid(), signal.SIGKILL)
tell(f"end-{me}", comm.members)
"""


@pytest.mark.parametrize("raises", [False, True])
def test_a_job_whose_members_have_all_failed_has_failed(jobs: Jobs, raises: bool) -> None:
    dead, spares = (0,) if raises else (0, 1), 1
    job = jobs.run_tolerant(len(dead) + spares, FAILING, SPARES=spares, FAILING_SPARE=-1, DEAD=dead, RAISES=raises)
    status, output = job.finish()
    assert status != 0, output


def test_a_rank_that_waits_and_fails_does_not_keep_others_from_joining(jobs: Jobs) -> None:
    job = jobs.run_tolerant(4, FAILING, SPARES=2, FAILING_SPARE=3, DEAD=(1,), RAISES=False)
    status, output = job.finish()
    assert [job.told(f"end-{rank}") for rank in (0, 2)] == ["(0, 2)"] * 2, output
    assert status == 0, output
