"""Fine-tuning runs of the study, kept on disk; and comparisons of their losses.

The ranks of a run are threads of one process, and as many runs as there are processors go on at once. Losses and bytes
are those of MPI processes, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from apps.pipeline.job import run_on_threads
from apps.pipeline.options import FULL, Options
from apps.records import Record
from apps.reproduce.claims import Difference, paired
from apps.studies.parallel import Run, run_parallel
from apps.studies.results import Results, slug

SEEDS, SEEDS_FULL, SEEDS_QUICK = 3, 5, 2
PRETRAINED = Options(stages=1, forward_bits=FULL, backward_bits=FULL, epochs=6, characters=200_000)
"""What makes the weights that all others begin with, on one rank."""
EPOCHS, CHARACTERS, LR = 10, 50_000, 5e-4
FP32 = replace(PRETRAINED, stages=4, epochs=EPOCHS, characters=CHARACTERS, skip=PRETRAINED.characters, lr=LR)
BITS = ((2, 4), (3, 6), (4, 8))
MOST = {(2, 4): 0.06, (3, 6): 0.04, (4, 8): 0.02}
"""Nats above float32 that count as no loss, by bits forward and backward."""
SAME = (
    f"GPT-style character model of 4 blocks of width {FP32.width}, trained on {PRETRAINED.characters // 1000} thousand "
    f"characters of Python's standard library and fine-tuned on {CHARACTERS // 1000} thousand others, {EPOCHS} epochs; "
    "there GPT2-1.5B on WikiText2"
)
QUICK_PART, QUICK_EPOCHS = 4, 2
"""A quick run has this part of the text and of the epochs."""


def how_many(seeds: int, full: bool, quick: bool = False) -> int:
    """Seeds of a run."""
    return min(seeds, SEEDS_QUICK if quick else SEEDS_FULL if full else SEEDS)


def shrink(options: Options, quick: bool) -> Options:
    """The options of a run, with less text and fewer epochs if it is `quick`."""
    if not quick:
        return options
    characters = max(options.characters // QUICK_PART, 20 * options.batch * options.context // 10)
    return replace(options, characters=characters, epochs=max(1, options.epochs // QUICK_EPOCHS))


def trained(
    results: Results,
    runs: Mapping[str, Options],
    seeds: int,
    quick: bool = False,
    pretrained: Options | None = PRETRAINED,
    prefix: str = "",
) -> dict[str, list[Record]]:
    """The records of each run, by seed.

    All begin with the weights that a run with the options `pretrained` ends with; None: with random weights. File names
    of both begin with the `prefix`.
    """
    weights: list[str | None] = [None] * seeds
    if pretrained is not None:
        weights = [
            str((results.folder / f"{slug(prefix)}weights-{seed}.safetensors").resolve()) for seed in range(seeds)
        ]
        _train(results, {
            (f"{slug(prefix)}pretrained", seed): (replace(shrink(pretrained, quick), seed=seed), path)
            for seed, path in enumerate(weights)
        })  # fmt: skip
    found = _train(results, {
        (slug(f"{prefix}{name}"), seed): (replace(shrink(options, quick), seed=seed, weights=weights[seed]), None)
        for seed in range(seeds)
        for name, options in runs.items()
    })  # fmt: skip
    return {name: [found[slug(f"{prefix}{name}"), seed] for seed in range(seeds)] for name in runs}


def _train(
    results: Results, plan: Mapping[tuple[str, int], tuple[Options, str | None]]
) -> dict[tuple[str, int], Record]:
    """Make the runs that are not kept, and save weights where a file is named; returns the records of all."""
    made: dict[tuple[str, int], Record] = {}
    missing: dict[tuple[str, int], Run] = {}
    for (name, seed), (options, save) in plan.items():
        file, own = f"{name}-{seed}", asdict(options)
        settings: Record = own if save is None else {"runs": [own]}
        known = results.kept(file, settings) if save is None or Path(save).exists() else None
        if known is None:
            (results.folder / f"{file}.json").unlink(missing_ok=True)
            missing[name, seed] = partial(results.get, file, settings, partial(_runs, own, save))
        else:
            made[name, seed] = known
    made |= run_parallel(missing)
    return {key: record["runs"][0] for key, record in made.items()}


def _runs(own: Record, save: str | None) -> Record:
    return {"runs": [run_on_threads(own, save)]}


def losses(records: Sequence[Record]) -> list[float]:
    """The last validation loss of each, evaluated with activations in full precision."""
    return [record["epochs"][-1]["validation_loss"] for record in records]


def by_epoch(records: Sequence[Record]) -> list[list[float]]:
    """The validation losses of each."""
    return [[epoch["validation_loss"] for epoch in record["epochs"]] for record in records]


def gap(ours: Sequence[Record], theirs: Sequence[Record]) -> Difference:
    """Difference of the last validation losses, in nats a character."""
    return paired(losses(ours), losses(theirs))


def mean_gap(ours: Sequence[Record], theirs: Sequence[Record]) -> float:
    """The same without its interval."""
    return float(np.mean(losses(ours)) - np.mean(losses(theirs)))
