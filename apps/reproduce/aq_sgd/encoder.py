"""Fine-tune a pretrained encoder to classify texts, in pipeline stages whose ranks are threads.

The encoder and the labelled texts are those of `apps.finetune`. Every text has `TOKENS` tokens, so that no mask need
travel with the activations.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apps.finetune import examples
from apps.finetune.methods import groups, schedule
from apps.finetune.pretrained import Classifier, Encoded, classifier, encode
from apps.records import Record
from collectives import Communicator
from collectives.threads.run_local import run_local
from mpicomp.codecs.rows import RowQuantizer
from mpicomp.pipeline import Deltas, Direct, PipelineStage

TOKENS = examples.DISTINCT_WORDS + 2
"""Of each text: as many words as every text has, [CLS] and [SEP]."""
TESTED_AT_ONCE = 81


@dataclass(frozen=True, kw_only=True)
class Options:
    """A run: bits forward and backward, and the training. Without bits activations and gradients travel in float32.

    `per_label` and `tested_per_label` have the texts of each label. Word embeddings keep their pretrained values.
    """

    bits: tuple[int, int] | None = None
    direct: bool = False
    stages: int = 3
    per_label: int = 20
    tested_per_label: int = 45
    epochs: int = 5
    batch: int = 16
    micro_batches: int = 4
    lr: float = 3e-4
    weight_decay: float = 0.01
    seed: int = 0


class First(nn.Module):
    """The embeddings of a text's tokens: int64[texts, tokens] -> float32[texts, tokens, width]."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        embedded: Tensor = self.embeddings(input_ids=tokens)
        return embedded


class Layer(nn.Module):
    """A layer of the encoder: float32[texts, tokens, width] -> the same."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor) -> Tensor:
        """See the class."""
        found = self.layer(states)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # as the version of transformers has it
        return out


class Last(nn.Module):
    """Scores of the labels: float32[texts, tokens, width] -> float32[texts, labels]."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, states: Tensor) -> Tensor:
        """See the class."""
        scores: Tensor = self.head(states.mean(1))
        return scores


class Loss:
    """Mean cross entropy, which also counts the texts that are classified correctly."""

    def __init__(self) -> None:
        self.correct = 0

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Mean over the texts, in nats."""
        self.correct += int((scores.argmax(1) == labels).sum())
        return nn.functional.cross_entropy(scores, labels)


def run_on_threads(options: dict[str, Any]) -> Record:
    """Train with these options; returns the record."""
    made = Options(**options)
    parts = examples.load()
    training = encode(first_of_each_label(parts.train, made.per_label), TOKENS)
    test = encode(first_of_each_label(parts.test, made.tested_per_label), TOKENS)
    whole = classifier(made.seed)  # here, as its library may not bear threads
    found = run_local(made.stages, lambda comm: _train(made, comm, whole, training, test))[0]
    return {"options": options, "texts": parts.digest(), **found}


def slice_of(whole: Classifier, stage: int, stages: int) -> nn.Sequential:
    """The part of a stage; the first one has the embeddings, and the last one the classifier."""
    encoder: Any = whole.encoder
    layers: Sequence[nn.Module] = list(encoder.encoder.layer)
    if stages > len(layers):
        raise ValueError(f"{len(layers)} layers cannot be spread over {stages} stages")
    ends = [len(layers) * k // stages for k in range(stages + 1)]
    parts: list[nn.Module] = [Layer(layer) for layer in layers[ends[stage] : ends[stage + 1]]]
    if stage == 0:
        parts.insert(0, First(encoder.embeddings.requires_grad_(False)))
    if stage == stages - 1:
        parts.append(Last(whole.head))
    return nn.Sequential(*parts)


def first_of_each_label(given: Iterable[examples.Example], count: int) -> list[examples.Example]:
    """The first so many texts of each label, in their order."""
    left = dict.fromkeys(range(len(examples.LABELS)), count)
    kept = []
    for one in given:
        if left[one.label]:
            left[one.label] -= 1
            kept.append(one)
    return kept


def _train(options: Options, comm: Communicator, whole: Classifier, training: Encoded, test: Encoded) -> Record:
    torch.set_num_threads(1)  # of this thread
    start = time.perf_counter()
    module = slice_of(whole, comm.rank, comm.size)
    loss = Loss()
    forward, backward = _compressions(options, len(training))
    stage = PipelineStage(
        module, comm, options.micro_batches, loss=loss if comm.rank == comm.size - 1 else None,
        forward=forward, backward=backward, seed=options.seed,
    )  # fmt: skip
    steps_per_epoch = len(training) // options.batch
    optimizer = torch.optim.AdamW(groups(module), options.lr, weight_decay=options.weight_decay)
    rate = schedule(optimizer, options.epochs * steps_per_epoch)
    losses = []
    try:
        for epoch in range(options.epochs):
            module.train()
            order = np.random.default_rng([options.seed, epoch]).permutation(len(training))
            for ids in np.split(order[: steps_per_epoch * options.batch], steps_per_epoch):
                optimizer.zero_grad()
                losses.append(stage.step(training.tokens[ids], training.labels[ids], ids))
                optimizer.step()
                rate.step()
        accuracy, test_loss = _tested(stage, loss, module, comm, test)
        alike = stage.stores_alike()
    finally:
        stage.close()
    return {
        "losses": losses, "steps_per_epoch": steps_per_epoch, "accuracy": accuracy, "test_loss": test_loss,
        "cuts_alike": alike, "seconds": time.perf_counter() - start,
    }  # fmt: skip


def _compressions(options: Options, texts: int) -> tuple[Direct | Deltas, Direct]:
    if options.bits is None:
        return Direct(), Direct()
    forward, backward = options.bits
    codec = RowQuantizer(forward)
    return Direct(codec) if options.direct else Deltas(codec, texts), Direct(RowQuantizer(backward, scale="float32"))


def _tested(
    stage: PipelineStage, loss: Loss, module: nn.Module, comm: Communicator, test: Encoded
) -> tuple[float, float]:
    """Accuracy and mean loss on the test texts, with activations in full precision; collective."""
    module.eval()
    loss.correct, total = 0, 0.0
    batches = zip(torch.split(test.tokens, TESTED_AT_ONCE), torch.split(test.labels, TESTED_AT_ONCE), strict=True)
    for tokens, labels in batches:
        total += len(labels) * stage.evaluate(tokens, labels)
    correct = comm.allgather_object(loss.correct)[-1]
    return correct / len(test), total / len(test)
