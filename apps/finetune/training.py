"""One run: a method fine-tunes the transformer, by ranks that are threads."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from apps.finetune.methods import Method, schedule
from apps.finetune.pretrained import Encoded
from apps.records import Record
from apps.train.data import Sampler
from apps.train.meter import Meter
from collectives import Communicator, NonFiniteGradient
from collectives.threads.run_local import run_local
from mpicomp.cli.timing import gather

RANKS = 2
BATCH = 8
"""Examples of a rank and step."""
EVALUATIONS = 4
"""Of a run, at equal distances; the last one is at its end."""
_EVALUATION_BATCH = 64


@dataclass(frozen=True)
class Run:
    """A run: `lr` is the highest learning rate; the seed decides the classifier's first weights and all orders."""

    method: Method
    lr: float
    seed: int
    steps: int


def train(run: Run, model: Callable[[int], nn.Module], examples: Encoded, held_out: Encoded) -> Record:
    """Fine-tune ``model(seed)``, which must be equal on each call, and evaluate it on `held_out` examples."""
    # the record has `diverged` alone, or steps, accuracy and loss of each evaluation, train_loss of each step,
    # bits_per_element per phase, and the seconds of the training steps on the slowest rank
    models = [model(run.seed) for _ in range(RANKS)]  # here, as their construction may not bear threads
    try:
        return run_local(RANKS, lambda comm: _rank(comm, run, models[comm.rank], examples, held_out), "ring")[0]
    except NonFiniteGradient:
        return {"diverged": True}
    finally:
        gc.collect()  # models lie in circles, of so few objects that Python would let them pile up


def _rank(comm: Communicator, run: Run, model: nn.Module, examples: Encoded, held_out: Encoded) -> Record:
    torch.set_num_threads(1)  # of this thread: the ranks are the parallel part
    optimizer = run.method.start(model, comm, run.lr, run.steps)
    scheduler, meter = schedule(optimizer, run.steps), Meter()
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    evaluated = {round((part + 1) * run.steps / EVALUATIONS) for part in range(EVALUATIONS)}
    losses: list[float] = []
    found: Record = {"diverged": False, "steps": [], "accuracy": [], "loss": []}
    for step, batch in zip(range(1, run.steps + 1), batches(len(examples), comm, run.seed), strict=False):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(examples.tokens[batch]), examples.labels[batch])
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
        meter.count(optimizer.aggregators)
        meter.seconds_training += time.perf_counter() - started
        if step in evaluated:
            accuracy, test_loss = evaluate(model, held_out, comm)
            found["steps"].append(step)
            found["accuracy"].append(accuracy)
            found["loss"].append(test_loss)
    cost = meter.summary(comm, n_parameters)
    found["train_loss"] = gather(comm, np.array(losses)).mean(axis=0).tolist()
    return found | {"bits_per_element": cost["bits_per_element"], "seconds": cost["seconds_so_far"]}


def batches(n: int, comm: Communicator, seed: int) -> Iterator[Tensor]:
    """The indices of this rank's examples of each step, without end; orders depend on the seed alone."""
    sampler = Sampler(n, BATCH, comm.rank, comm.size, seed)
    epoch = 0
    while True:
        yield from sampler.epoch(epoch)
        epoch += 1


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Encoded, comm: Communicator) -> tuple[float, float]:
    """Accuracy and mean loss, of which each rank computes a part; collective."""
    mine = slice(comm.rank, None, comm.size)
    right, loss = 0, 0.0
    for tokens, labels in zip(
        torch.split(held_out.tokens[mine], _EVALUATION_BATCH),
        torch.split(held_out.labels[mine], _EVALUATION_BATCH),
        strict=True,
    ):
        scores = model(tokens)
        right += int((scores.argmax(1) == labels).sum())
        loss += float(F.cross_entropy(scores, labels, reduction="sum"))
    totals = gather(comm, np.array([right, loss], np.float64)).sum(axis=0)
    return float(totals[0]) / len(held_out), float(totals[1]) / len(held_out)


def score(record: Record) -> float:
    """Return the loss at the end, which chooses learning rates: with few examples it is finer than the accuracy."""
    return -math.inf if record["diverged"] else -float(record["loss"][-1])
