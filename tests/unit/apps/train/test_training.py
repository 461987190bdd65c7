"""Evaluation of a run whose ranks die meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from apps.train import training as training_module
from apps.train.data import Dataset, Split, load
from apps.train.options import parse
from apps.train.training import Training
from mpicomp import Communicator, Dense, run_local

DIGITS = load("digits")
DATASET = Dataset(DIGITS.train, Split(DIGITS.test.images[:50], DIGITS.test.labels[:50]), 10)


def test_the_part_of_a_rank_that_died_after_it_was_evaluated_is_evaluated_by_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(comm: Communicator) -> None:
        training = Training(parse(["--hidden", "4"]), comm, DATASET, Dense())
        expected = training.evaluate(DATASET.test)
        gathered: list[Any] = []

        def gather_rows(comm: Communicator, values: np.ndarray) -> np.ndarray:
            gathered.append(values)
            comm.size = 1  # rank 1 has died: this rank alone reports, first for every second image
            return values[np.newaxis]

        monkeypatch.setattr(training_module, "gather_rows", gather_rows)
        comm.size = 2
        assert training.evaluate(DATASET.test) == expected
        assert [row[2] for row in gathered] == [2, 1]
        assert gathered[0][1] < gathered[1][1]

    run_local(1, work)
