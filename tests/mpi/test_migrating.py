"""The code of the pages for users of Horovod, DeepSpeed and DDP's hooks has the described results, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicomp
from collectives import Communicator
from mpicomp.torch import DDPHookState, DistributedOptimizer, OneBitAdam, OneBitLamb, ZeroOneAdam
from tests.documents import PROJECT
from tests.mpi.examples import Names, run
from tests.mpi.lanes import three_ranks

# On eight ranks that share two cores, loading torch's compiler takes most of a minute.
pytestmark = pytest.mark.timeout(300)

PAGES = sorted((PROJECT / "docs").glob("migrating*.md"))
STEPS = 3

# Expected results of a row's code, in the names of its page; `it` is its value, and x is rank + 1 everywhere.
MEANING = {
    "(cross.rank, cross.size)": "it == (comm.rank // comm.local_size, comm.size // comm.local_size)",
    "len(set(comm.allgather_object(comm.local_size))) == 1": "it is True",
    'comm.allreduce(x, op="mean")': "torch.equal(it, torch.full_like(x, (comm.size + 1) / 2))",
    'comm.allreduce(x, op="mean", out=x)': "torch.equal(x, torch.full_like(x, (comm.size + 1) / 2))",
    "comm.allreduce(x)": "torch.equal(it, torch.full_like(x, comm.size * (comm.size + 1) / 2))",
    'comm.allreduce(x, op="max")': "torch.equal(it, torch.full_like(x, comm.size))",
    "dist.all_reduce(x, dist.ReduceOp.PRODUCT)": "x[0, 0] == __import__('math').factorial(comm.size)",
    "comm.allreduce(x * a) * b": "torch.equal(it, torch.full_like(x, comm.size * (comm.size + 1)))",
    "half.aggregate(x)": "torch.equal(it, torch.full_like(x, (comm.size + 1) / 2))",
    'comm.allreduce(accuracy, op="mean")': "it == (comm.size - 1) / 8",
    "handle.wait()": "torch.equal(it, torch.full_like(x, (comm.size + 1) / 2))",
    "[handle.wait() for handle in handles]": "[len(one) for one in it] == [comm.size] * 2",
    "comm.allgather(rows)": "len(it) == comm.size * (comm.size - 1) // 2",
    "comm.broadcast(x, 0)": "torch.equal(x, torch.ones_like(x))",
    "dist.broadcast(x, 0, async_op=True).wait()": "torch.equal(x, torch.ones_like(x))",
    "dist.all_to_all_single(out, x, ones, ones)": "out[:, 0].tolist() == list(range(1, comm.size + 1))",
    "dist.reduce_scatter(out[:1], [*x.split(1)], dist.ReduceOp.AVG)": "(out[0] == (comm.size + 1) / 2).all()",
    "comm.allgather_object(settings)": "it == [settings] * comm.size",
    'pair.allreduce(x, op="mean")': "it[0, 0] == (2 * (comm.rank // 2 * 2) + pair.size + 1) / 2",
    "OneBitAdam(weights, warmup_steps=1, comm=comm).masked": "it == 0",
    "with model.no_sync(): model(inputs).sum().backward()": "net[0].weight.grad is not None",
    "redistribute_states(states, comm.size + 1)": "len(it) == comm.size + 1",
}


@pytest.fixture(autouse=True)
def one_folder_for_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, passes: int = 1) -> None:
    torch.manual_seed(MPI.COMM_WORLD.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(passes):
            inputs = torch.randn(8, 20, dtype=next(model.parameters()).dtype)
            nn.functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
        optimizer.step()


def require_one_model(model: nn.Module, comm: Communicator) -> None:
    parameters = torch.cat([one.detach().flatten().float() for one in model.parameters()])
    assert torch.isfinite(parameters).all()
    assert len(set(comm.allgather_object(parameters.numpy().tobytes()))) == 1


def try_out(code: str, value: Any, names: Names) -> None:
    """Train with a row's objects and check that the ranks share one model; or check that its value is right."""
    model = names.get("model")
    if isinstance(value, DistributedOptimizer | OneBitAdam | ZeroOneAdam | OneBitLamb):
        module = model.module if isinstance(model, DistributedDataParallel) else model
        train(module, value, passes=2 if "passes_per_step=2" in code else 1)
        if value.models_differ:
            value.synchronize()
        require_one_model(module, value.comm)
    elif isinstance(value, tuple) and isinstance(value[0], DDPHookState):
        state, hook = value
        model.register_comm_hook(state, hook)
        train(model, names["sgd"])
        assert state.iterations == STEPS
        require_one_model(model, names["comm"])
    elif code.startswith("model.register_comm_hook"):
        train(model, names["sgd"])
        require_one_model(model, names["comm"])
    elif isinstance(value, Communicator) and value is not names["comm"]:
        value.close()
    if code in MEANING:
        right = eval(MEANING[code], names, {"it": value})
        assert right, f"{code} gives {value}, and this does not hold: {MEANING[code]}"


@pytest.mark.filterwarnings("ignore:.*DistributedDataParallel also sends")  # the rows train the model in it without it
@three_ranks
def test_every_row_of_the_pages_runs_and_does_what_it_says(mpi_comm: MPI.Intracomm) -> None:
    tried = []

    def look(code: str, value: Any, names: Names) -> None:
        try_out(code, value, names)
        tried.append(code)

    for page in PAGES:
        run(page, look)
    assert MEANING.keys() <= set(tried)
    assert len(tried) > 70


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_16_bits_are_rounded_as_by_a_cast_there_and_back_and_summed_in_float32(comm: Communicator, wire: Any) -> None:
    dtype = getattr(torch, wire)
    x = torch.randn(5000, generator=torch.Generator().manual_seed(comm.rank))
    first, *others = comm.allgather(x.to(dtype).float()[None])
    expected = (sum(others, first) / comm.size).to(dtype).float()
    assert torch.equal(mpicomp.Dense(wire=wire).start(comm, 5000).aggregate(x), expected)


def test_16_bits_are_those_of_bfloat16_and_what_is_cut_off_comes_later(comm: Communicator) -> None:
    n, steps, step_of_bfloat16 = 64_000, 16, 2.0**-7
    x = torch.full((n,), 1 + 0.6 * step_of_bfloat16)
    squeeze = mpicomp.DoubleSqueeze("clip:bits=16").start(comm, n)
    first = squeeze.aggregate(x)
    assert (first == 1).all()
    later = sum((squeeze.aggregate(x) for _ in range(steps - 1)), first)
    assert (later - steps * x).abs().max() < 4 * step_of_bfloat16  # without feedback 9.6
    if comm.size > 1:
        sent = comm.allreduce(squeeze.traffic.last.bytes_sent)
        assert sent / (2 * n * (comm.size - 1)) == pytest.approx(2, rel=0.01)
