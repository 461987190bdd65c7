"""States of training runs on other numbers of ranks: the place where an epoch goes on, and the records."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from apps.train.data import Sampler, load
from apps.train.options import parse
from apps.train.redistribute import redistribute
from apps.train.training import Training
from mpicomp import Communicator, Marsit, run_local

DIGITS = load("digits")
ARGV = ("--hidden", "8", "--epochs", "3", "--decay", "cosine", "--warmup-epochs", "1")
State = dict[str, Any]


def rest(training: Training) -> set[int]:
    """Return the images that this rank has yet to draw in the epoch."""
    batches = iter(training.dealer.draw, None)
    return {index for batch in batches for index in batch.tolist()}


def begin(ranks: int, batch: int, steps: int) -> tuple[list[State], dict[str, Any], set[int]]:
    """All ranks' states after steps of the first epoch, their model, and the images that they saw."""

    def work(comm: Communicator) -> tuple[State, dict[str, Any], set[int]]:
        training = Training(parse([*ARGV, "--batch", str(batch)]), comm, DIGITS, Marsit(3))
        training.train_epoch(lambda: training.step == steps)
        seen = set(Sampler(len(DIGITS.train), batch, comm.rank, ranks, 0).epoch(0)[:steps].flatten().tolist())
        return copy.deepcopy(training.state_dict()), copy.deepcopy(training.model.state_dict()), seen

    states, models, seen = zip(*run_local(ranks, work), strict=True)
    return list(states), models[0], set.union(*seen)


@pytest.mark.parametrize(("ranks", "batch"), [(2, 32), (3, 32), (4, 8), (1, 600), (1, 16), (2, 450)])
def test_an_epoch_goes_on_where_it_was_on_other_ranks(ranks: int, batch: int) -> None:
    states, model, seen = begin(3, 16, 20)
    new = redistribute(states, ranks)

    def work(comm: Communicator) -> tuple[set[int], float, tuple[int, ...], float]:
        training = Training(parse([*ARGV, "--batch", str(batch)]), comm, DIGITS, Marsit(3))
        for part in training.restoring(model, new[comm.rank]):
            part()
        place = training.step, training.epoch, training.position, training.dealer.n_steps
        rate = training.learning_rate(training.position)
        return rest(training), float(training._loss_sum) / training._loss_images, place, rate

    lefts, losses, places, rates = zip(*run_local(ranks, work), strict=True)
    left = set.union(*lefts)
    size = ranks * batch
    assert len(left) == sum(map(len, lefts))
    assert not left & seen
    assert len(DIGITS.train) - len(seen) - len(left) < size
    assert set(places) == {(20, 0, 20 * 48 // size, 1437 // size)}
    progress = (20 * 48 // size) / (1437 // size)
    assert rates[0] == pytest.approx(0.03 * progress, rel=0.1, abs=0.03 * size / 1437)
    mean = np.mean([float(state["loss_sum"]) for state in states]) / (20 * 48)
    assert losses == pytest.approx([mean] * ranks)


def test_the_same_global_batch_has_the_same_steps() -> None:
    states, model, _ = begin(4, 16, 7)

    def work(comm: Communicator) -> tuple[int, int, float]:
        training = Training(parse([*ARGV, "--batch", "32"]), comm, DIGITS, Marsit(3))
        for part in training.restoring(model, redistribute(states, 2)[comm.rank]):
            part()
        return training.position, training.n_steps, training.learning_rate(training.position)

    position, n_steps, rate = run_local(2, work)[0]
    assert (position, n_steps) == (7, 3 * (1437 // 64))
    assert rate == 0.03 * 8 / 23


def test_totals_go_on_so_that_records_stay_true() -> None:
    states, *_ = begin(3, 16, 6)
    meters = [state["meter"] for state in states]
    for new in redistribute(redistribute(states, 1), 2):
        meter = new["meter"]
        assert meter["rounds"] == 6
        assert meter["bytes_sent"] == round(np.mean([one["bytes_sent"] for one in meters]))
        assert meter["seconds_training"] == max(one["seconds_training"] for one in meters)
        assert meter["vectors_moved"] == pytest.approx(6 * 2 * 2 / 3)


def test_buffers_become_their_means_and_counts_stay() -> None:
    states, *_ = begin(3, 16, 1)
    for rank, state in enumerate(states):
        state["buffers"] = {"mean": torch.tensor([1.0, rank]), "seen": torch.tensor(5)}
    for state in redistribute(states, 2):
        assert state["buffers"]["mean"].tolist() == [1.0, 1.0]
        assert state["buffers"]["seen"] == 5
        assert state["torch_random"] is None


@pytest.mark.parametrize("key", ["epoch", "step", "images", "loss_images", "best_accuracy"])
def test_states_of_different_steps_are_told(key: str) -> None:
    states, *_ = begin(2, 16, 1)
    states[1][key] = 77
    with pytest.raises(ValueError, match=f"ranks 0 and 1 differ in {key} .* and 77.: they are of different runs"):
        redistribute(states, 2)
