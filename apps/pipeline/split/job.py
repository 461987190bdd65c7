"""Runs as a function that an MPI job calls on each rank, with options and records that can be written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apps.pipeline.split.options import Options
from apps.pipeline.split.training import images_of, train
from apps.records import Record
from collectives import Communicator


def run(runs: Sequence[dict[str, Any]]) -> Record:
    """Train with each of these options, one after the other; returns the record of each under ``runs``."""
    torch.set_num_threads(1)
    with Communicator() as comm:
        return {"runs": [train(options, comm, images_of(options)) for options in (Options(**each) for each in runs)]}
