"""SparseLoCo (Sarfi et al., arXiv 2508.15706): held-out loss and bytes of a character model after local steps.

All methods train the same model on the same batches with AdamW inside, each at its own learning rate:

- mean gradients: the exact mean of the gradients at every step, in float32
- local steps: `LOCAL_STEPS` steps on each rank, then the exact mean of their updates
- SparseLoCo: the same steps, then 64 of each 4096 elements in 2 bits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.pipeline.model import Shape, loss, slice_of
from apps.pipeline.text import Corpus, load
from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim, paired
from apps.reproduce.diloco import make_record, score, step_on_batch
from apps.studies.parallel import Run, run_seeds
from apps.studies.results import Results, slug
from apps.studies.tuning import climb
from collectives import Communicator
from collectives.threads.run_local import run_local
from mpicomp import Dense, SparseLoCo
from mpicomp.algorithms import Algorithm
from mpicomp.torch import DistributedOptimizer

RANKS, LOCAL_STEPS, BATCH = 4, 30, 4
STEPS, STEPS_FULL = 300, 2400
SEEDS = 3
CHARACTERS, HELD_OUT = 200_000, 100
"""Of the text, and sequences of its held-out part that are evaluated, every `EVALUATED` steps."""
EVALUATED = 2 * LOCAL_STEPS
SHAPE = Shape(layers=2, width=96)
LEARNING_RATES = (1e-3, 2e-3, 4e-3)
FIRST = 2e-3
TUNING_SEED = 1000  # of the runs that choose a learning rate, and of no others
GRADIENTS, LOCAL, SPARSE = "mean gradients", "local steps", "SparseLoCo"
METHODS: Mapping[str, tuple[Algorithm, int]] = {
    GRADIENTS: (Dense(), 1),
    LOCAL: (Dense(), LOCAL_STEPS),
    SPARSE: (SparseLoCo(), LOCAL_STEPS),
}
MARGIN = 0.02
"""Nats a character that count as no loss if the difference is surely smaller."""


def train(comm: Communicator, corpus: Corpus, name: str, lr: float, seed: int, steps: int) -> Record:
    """Train one rank's replica; collective.

    Returns
    -------
    dict
        ``losses``: held-out, in nats a character, after every `EVALUATED` steps. ``bytes``: sent by all
        synchronizations, mean over ranks. ``elements``: of the model.
    """
    method, local_steps = METHODS[name]
    model = slice_of(SHAPE, 0, 1, seed)
    inner = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    mode: Any = "gradients" if local_steps == 1 else "updates"
    optimizer = DistributedOptimizer(inner, method, comm, synchronize=mode, local_steps=local_steps)
    random, losses = np.random.default_rng((seed, comm.rank)), []
    for step in range(1, steps + 1):
        step_on_batch(model, optimizer, corpus, random.integers(0, len(corpus.training), BATCH))
        if step % EVALUATED == 0:
            losses.append(held_out(model, corpus) if comm.rank == 0 else 0.0)
    return make_record(comm, optimizer, model, losses)


@torch.no_grad()
def held_out(model: torch.nn.Module, corpus: Corpus) -> float:
    """Return the mean loss of the held-out text."""
    rows = torch.from_numpy(corpus.validation[:HELD_OUT])
    return float(loss(model(rows[:, :-1]), rows[:, 1:]))


def run(name: str, lr: float, seed: int, steps: int) -> Record:
    """Train on ranks that are threads, which send the bytes of processes; return rank 0's record."""
    torch.set_num_threads(1)
    corpus = load(None, CHARACTERS, SHAPE.context)
    return run_local(RANKS, lambda comm: train(comm, corpus, name, lr, seed, steps), "ring", timeout=600)[0]


def kept(results: Results, name: str, lr: float, seed: int, steps: int) -> Record:
    """Return the record of a run, which is made if there is none with these settings."""
    method, local_steps = METHODS[name]
    settings = {"method": repr(method), "local_steps": local_steps, "lr": lr, "steps": steps, "shape": repr(SHAPE)}
    settings |= {"ranks": RANKS, "batch": BATCH, "characters": CHARACTERS}
    return results.get(f"{slug(name)}-{lr:g}-{steps}-{seed}", settings, partial(run, name, lr, seed, steps))


def study(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Train by every method at its best learning rate, and compare losses and bytes."""
    steps = STEPS_FULL if full else STEPS

    def make(name: str, lr: float, seed: int) -> Run:
        return partial(kept, results, name, lr, seed, steps)

    rates = climb(LEARNING_RATES, dict.fromkeys(METHODS, FIRST), partial(make, seed=TUNING_SEED), score)
    return compare_all(results, rates, min(seeds, SEEDS), steps, "the best of three on another seed")


def quick(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Train by every method at one learning rate."""
    return compare_all(results, dict.fromkeys(METHODS, FIRST), seeds, STEPS, "not tuned")


def compare_all(
    results: Results, rates: Mapping[str, float], seeds: int, steps: int, tuning: str
) -> tuple[list[Claim], list[Path]]:
    """Train by every method at these learning rates, and compare losses and bytes."""
    found = run_seeds(METHODS, seeds, lambda name, seed: partial(kept, results, name, rates[name], seed, steps))
    return judge(found, rates, steps, tuning), [draw(found, results.folder / "losses.png")]


def judge(found: Mapping[str, Sequence[Record]], rates: Mapping[str, float], steps: int, tuning: str) -> list[Claim]:
    """Compare the last losses, and the bytes with those that the messages' sizes predict."""
    losses = {name: [record["losses"][-1] for record in records] for name, records in found.items()}
    sent = {name: float(np.mean([record["bytes"] for record in records])) for name, records in found.items()}
    elements, seeds = found[SPARSE][0]["elements"], len(found[SPARSE])
    differs = (
        f"character model of {elements:,} elements, {steps} steps of {BATCH} sequences of {SHAPE.context} characters a "
        f"rank, {RANKS} ranks, H = {LOCAL_STEPS}, {seeds} seeds; constant learning rates "
        f"{', '.join(f'{rates[name]:g} ({name})' for name in METHODS)}, {tuning}"
    )
    paper = "512 million elements, 1 to 3 % of them sent: below DiLoCo's loss"

    def compare(name: str, other: str, judged: bool) -> Claim:
        gap = paired(losses[name], losses[other])
        ours = (
            f"{np.mean(losses[name]):.3f} against {np.mean(losses[other]):.3f} nats, difference {gap}; "
            f"{sent[name] / 1e6:.3g} MB against {sent[other] / 1e6:.3g} MB sent per rank"
        )
        words = "ends as low as" if judged else "against"
        margin = f"; “as low”: surely less than {MARGIN} nats above; there is no outer momentum" if judged else ""
        what = f"{name} {words} {other}"
        return Claim(
            "Sec. 4", what, paper if judged else "–", ours, gap.most < MARGIN if judged else None, differs + margin
        )

    # dense: 2 (M - 1) / M of the vector; gathered: M - 1 messages
    model = SparseLoCo().message_model(elements, "float32", RANKS, 1 << 20)
    factor = 2 * 4 * elements / (RANKS * model.nbytes(elements, 1))
    bytes_sent = Claim(
        "Sec. 3",
        f"a synchronization of SparseLoCo sends {factor:.1f} times fewer bytes than a dense ring of {RANKS} ranks",
        "64 of 4096 elements at 14 bits: a message is 146 times shorter",
        f"{sent[LOCAL] / sent[SPARSE]:.1f} times",
        bool(abs(sent[LOCAL] / sent[SPARSE] / factor - 1) < 0.2),
        f"{RANKS - 1} messages arrive at each rank, so the factor is 2/M of the messages'; here each tensor also has "
        "four levels, and short tensors round up",
    )
    return [
        compare(SPARSE, LOCAL, True),
        compare(SPARSE, GRADIENTS, False),
        compare(LOCAL, GRADIENTS, False),
        bytes_sent,
    ]


def draw(found: Mapping[str, Sequence[Record]], path: Path) -> Path:
    """Draw held-out loss against steps; returns the path."""
    lines = []
    for name, records in found.items():
        losses = [record["losses"] for record in records]
        lines.append(Curve(name, range(EVALUATED, EVALUATED * len(losses[0]) + 1, EVALUATED), losses))
    elements, seeds = found[SPARSE][0]["elements"], len(found[SPARSE])
    note = (
        f"A character model of {elements:,} elements on {RANKS} ranks, {seeds} seeds: means, and shaded from the least "
        f"to the greatest. Mean gradients: averaged at every step. Local steps: {LOCAL_STEPS} steps on each rank, then "
        "their updates averaged in full. SparseLoCo: the same with 64 of 4096 elements in 2 bits."
    )
    return curves(path, lines, "step", "held-out loss, nats a character", title=finding(found), note=note)


def finding(found: Mapping[str, Sequence[Record]]) -> str:
    """The title: bytes and loss of SparseLoCo compared with local steps that are averaged in full."""
    ends = {name: np.mean([record["losses"][-1] for record in found[name]]) for name in (SPARSE, LOCAL)}
    sent = {name: np.mean([record["bytes"] for record in found[name]]) for name in (SPARSE, LOCAL)}
    above = ends[SPARSE] - ends[LOCAL]
    return (
        f"SparseLoCo sends {sent[LOCAL] / sent[SPARSE]:.0f} times fewer bytes than averaging local steps in full "
        f"and ends {abs(above):.2f} nats {'above' if above > 0 else 'below'} it"
    )


PARTS = (study,)
QUICK = (quick,)
