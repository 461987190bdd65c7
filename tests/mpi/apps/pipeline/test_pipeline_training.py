"""Training in pipeline stages: runs that are resumed, stores in files, replicas, and both ends of each cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.pipeline.job import record
from apps.pipeline.options import FULL, Options
from apps.pipeline.text import SYMBOLS, Corpus
from apps.pipeline.training import Record, Training
from collectives import Communicator
from collectives.threads.run_local import run_local
from mpicomp.pipeline import PipelineError
from tests.mpi.lanes import few_ranks

EPOCHS = 3
SMALL = Options(
    layers=4, width=16, heads=2, context=16, epochs=EPOCHS, batch=8, micro_batches=4, forward_bits=3, backward_bits=6
)

# A first, a middle and a last stage.
three_stages = pytest.mark.mpi(min_size=3, max_size=3)


def corpus() -> Corpus:
    """Sequences in which each character tells the next."""
    starts = np.random.default_rng(3).integers(0, len(SYMBOLS), 48)
    sequences = (starts[:, None] + np.arange(SMALL.context + 1)) % len(SYMBOLS)
    return Corpus("counting", "counting", sequences[:40].astype(np.int64), sequences[40:].astype(np.int64))


@contextmanager
def training(options: Options, comm: Communicator, folder: Path | None = None) -> Iterator[Training]:
    made = Training(replace(options, stages=comm.size // options.replicas), comm, corpus(), folder)
    try:
        yield made
    finally:
        made.close()


def trained(options: Options, comm: Communicator, folder: Path | None = None) -> tuple[list[Record], Training]:
    with training(options, comm, folder) as run:
        return [run.train_epoch() for _ in range(EPOCHS)], run


def weights(run: Training) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize(
    "options",
    [replace(SMALL, forward_bits=2, backward_bits=4), replace(SMALL, replicas=2, micro_batches=2, gradient_bits=4)],
    ids=["stages", "replicas"],
)
def test_ranks_that_are_threads_lose_what_processes_lose_bit_by_bit(comm: Communicator, options: Options) -> None:
    if comm.size % options.replicas:  # an odd number of ranks is one pipeline
        options = replace(options, replicas=1)
    _, here = trained(options, comm)
    if comm.rank == 0:
        on_threads = run_local(comm.size, lambda local: trained(options, local)[1].losses)
        assert on_threads == [here.losses] * comm.size


@three_stages
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_resumed_run_is_the_uninterrupted_one(comm: Communicator, store: str, folder: Path) -> None:
    options = replace(SMALL, store=store)
    expected, whole = trained(options, comm, folder / "whole")
    with training(options, comm, folder / "resumed") as first:
        first.train_epoch()
        state = first.state_dict()
    with training(options, comm, folder / "resumed") as second:
        second.load_state_dict(state)
        found = [second.train_epoch() for _ in range(1, EPOCHS)]
        assert second.stage.stores_alike()
    keys = ("epoch", "loss", "validation_loss", "bytes_forward", "bytes_backward")
    assert [[each[key] for key in keys] for each in found] == [[each[key] for key in keys] for each in expected[1:]]
    assert second.losses == whole.losses
    assert torch.equal(weights(second), weights(whole))


@three_stages
def test_files_that_are_ahead_of_the_checkpoint_serve_the_run_that_goes_on_from_it(
    comm: Communicator, folder: Path
) -> None:
    options = replace(SMALL, store="disk")
    with training(options, comm, folder) as first:
        first.train_epoch()
        state = first.state_dict()
        first.train_epoch()
    if comm.rank == 0:
        (lost,) = (folder / "replica-0").glob("cut-0-before")
        lost.unlink()  # one end has lost what it kept, and the other one is ahead
    with training(options, comm, folder) as second:
        second.load_state_dict(state)
        again = second.train_epoch()
        assert second.stage.stores_alike()
    assert again["epoch"] == 2
    assert again["bytes_forward"] > 1.2 * again["bytes_backward"]  # half of them, if nothing is sent in full


@three_stages
def test_what_the_ends_count_differently_is_sent_in_full(comm: Communicator) -> None:
    with training(SMALL, comm) as run:
        full, few = (run.train_epoch()["bytes_forward"] for _ in range(2))
        assert few < full / 4
        state = run.state_dict()
        run.train_epoch()
        ahead = run.state_dict()
        mixed = ahead if comm.rank == 0 else state
        mixed["stage"]["steps"] = state["stage"]["steps"]
        run.stage.load_state_dict(mixed["stage"])
        assert run.train_epoch()["bytes_forward"] > few
        assert run.stage.stores_alike()


@few_ranks
def test_a_run_learns_and_keeps_few_micro_batches(comm: Communicator) -> None:
    epochs, run = trained(replace(SMALL, lr=0.01), comm)
    assert epochs[-1]["validation_loss"] < epochs[0]["validation_loss"] < 1.2 * np.log(len(SYMBOLS))
    assert run.stage.most_alive == min(comm.size - comm.rank, SMALL.micro_batches)


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("bits", [4, FULL])
def test_replicas_stay_equal(comm: Communicator, bits: int) -> None:
    options = replace(SMALL, replicas=2, gradient_bits=bits, batch=4, micro_batches=2)
    with training(options, comm) as run:
        losses = [run.train_epoch()["loss"] for _ in range(EPOCHS)]
        same = run.grid.along("replica").allgather_object(weights(run).numpy().tobytes())
        assert len(set(same)) == 1
        assert losses[-1] < losses[0]
        found = record(run, [])
    assert found["cuts_alike"]


def test_a_grid_that_does_not_fit_the_ranks_is_refused(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=rf"replica=3 x stage=2 has 6 ranks, and there (is|are) {comm.size}"):
        Training(replace(SMALL, stages=2, replicas=3), comm, corpus())


@pytest.mark.mpi(min_size=4, max_size=4)
def test_a_replica_that_fails_ends_the_step_of_all(comm: Communicator) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    with training(replace(SMALL, replicas=2, gradient_bits=4, batch=4, micro_batches=2), comm) as run:
        if run.replica == 1:
            run.model.register_forward_pre_hook(fail)
        with pytest.raises(PipelineError, match="RuntimeError: out of luck"):
            run.train_epoch()
