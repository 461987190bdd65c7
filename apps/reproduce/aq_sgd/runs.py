"""Fine-tuning runs of the study on MPI ranks, kept on disk; and what is said of their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from apps.mpi_jobs import call_on_ranks
from apps.pipeline.job import run
from apps.pipeline.options import FULL, Options
from apps.records import Record
from apps.reproduce.claims import Difference, paired
from apps.reproduce.results import Results, slug

SEEDS, SEEDS_FULL = 3, 5
PRETRAINED = Options(stages=1, forward_bits=FULL, backward_bits=FULL, epochs=6, characters=200_000)
"""What makes the weights that all others begin with, on one rank."""
EPOCHS, CHARACTERS, LR = 10, 50_000, 5e-4
FP32 = replace(PRETRAINED, stages=4, epochs=EPOCHS, characters=CHARACTERS, skip=PRETRAINED.characters, lr=LR)
BITS = ((2, 4), (3, 6), (4, 8))
SAME = (
    f"GPT-style character model of 4 blocks of width {FP32.width}, trained on {PRETRAINED.characters // 1000} thousand "
    f"characters of Python's standard library and fine-tuned on {CHARACTERS // 1000} thousand others, {EPOCHS} epochs; "
    "there GPT2-1.5B on WikiText2"
)


def how_many(seeds: int, full: bool) -> int:
    """Seeds of a run."""
    return min(seeds, SEEDS_FULL if full else SEEDS)


def trained(results: Results, runs: Mapping[str, Options], seeds: int) -> dict[str, list[Record]]:
    """The records of each run, by seed."""
    found: dict[str, list[Record]] = {name: [] for name in runs}
    for seed in range(seeds):
        weights = _pretrained(results, seed)
        for name, options in runs.items():
            own = asdict(replace(options, seed=seed, weights=weights))
            make = partial(call_on_ranks, run, {"runs": [own]}, options.stages * options.replicas)
            found[name] += results.get(f"{slug(name)}-{seed}", own, make)["runs"]
    return found


def _pretrained(results: Results, seed: int) -> str:
    """The file of the weights of a seed, which is made if it is not there."""
    path = results.folder / f"weights-{seed}.safetensors"
    if not path.exists():
        (results.folder / f"pretrained-{seed}.json").unlink(missing_ok=True)
    options = asdict(replace(PRETRAINED, seed=seed))
    make = partial(call_on_ranks, run, {"runs": [options], "save": str(path.resolve())}, 1)
    results.get(f"pretrained-{seed}", {"runs": [options]}, make)
    return str(path.resolve())


def losses(records: Sequence[Record]) -> list[float]:
    """The last validation loss of each, evaluated with activations in full precision."""
    return [record["epochs"][-1]["validation_loss"] for record in records]


def by_epoch(records: Sequence[Record]) -> list[list[float]]:
    """The validation losses of each."""
    return [[epoch["validation_loss"] for epoch in record["epochs"]] for record in records]


def gap(ours: Sequence[Record], theirs: Sequence[Record]) -> Difference:
    """Of the last validation losses, in nats a character."""
    return paired(losses(ours), losses(theirs))


def mean_gap(ours: Sequence[Record], theirs: Sequence[Record]) -> float:
    """The same without its interval."""
    return float(np.mean(losses(ours)) - np.mean(losses(theirs)))
