"""All runs of the study: of each method and seed, and those that choose the learning rates. Finished runs are kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from apps.finetune import examples, pretrained
from apps.finetune.methods import METHODS, RATES
from apps.finetune.training import BATCH, EVALUATIONS, RANKS, Run, score, train
from apps.records import Record
from apps.studies.parallel import run_seeds
from apps.studies.results import Results, slug
from apps.studies.tuning import climb

LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
TUNING_SEED = 1000  # of the runs that choose a learning rate, and of no others


def compare(results: Results, names: Sequence[str], seeds: int, steps: int) -> dict[str, list[Record]]:
    """The runs of each method, by seed, evaluated on the test examples."""

    def make(name: str, seed: int) -> partial[Record]:
        return partial(fine_tuned, results, name, Run(METHODS[name], RATES[name], seed, steps), "test")

    return run_seeds(names, seeds, make)


def tune(results: Results, names: Sequence[str], steps: int) -> dict[str, float]:
    """The best learning rate of each method, by the loss on the validation examples; the neighbours were tried too."""

    def make(name: str, rate: float) -> partial[Record]:
        return partial(fine_tuned, results, name, Run(METHODS[name], rate, TUNING_SEED, steps), "validation")

    return climb(LADDER, {name: RATES[name] for name in names}, make, score)


def fine_tuned(results: Results, name: str, run: Run, part: str) -> Record:
    """The record of a run, from the folder if it is there; `part` of the examples is what it is evaluated on."""
    found = examples.load()
    settings = {
        "method": repr(run.method), "lr": run.lr, "seed": run.seed, "steps": run.steps, "part": part,
        "ranks": RANKS, "batch": BATCH, "tokens": pretrained.TOKENS, "evaluations": EVALUATIONS,
        "examples": found.digest(),
    }  # fmt: skip
    file = f"{slug(name)}-{part}-{run.lr:g}-{run.seed}"
    return results.get(file, settings, lambda: train(run, pretrained.classifier, _encoded("train"), _encoded(part)))


@cache
def _encoded(part: str) -> pretrained.Encoded:
    return pretrained.encode(getattr(examples.load(), part))
