"""Runs whose options and records can be written as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from apps.pipeline.model import read_weights
from apps.pipeline.options import Options
from apps.pipeline.text import Corpus, load
from apps.pipeline.training import Training
from apps.records import Record
from collectives import Communicator
from collectives.threads.run_local import run_local


def run_on_threads(options: dict[str, Any], save: str | None = None) -> Record:
    """Train on ranks that are threads; return the record, with MPI's losses. `save` is a file for the final weights."""
    made = Options(**options)
    return run_local(made.stages * made.replicas, lambda comm: _trained(made, comm, save))[0]


def _trained(options: Options, comm: Communicator, save: str | None = None) -> Record:
    torch.set_num_threads(1)  # of this thread
    start = time.perf_counter()
    corpus = corpus_of(options)
    training = Training(options, comm, corpus, weights=weights_of(options))
    try:
        epochs = [training.train_epoch() for _ in range(options.epochs)]
        if save is not None:
            save_weights(training, Path(save), comm.rank == 0)
        return record(training, epochs) | {"text": corpus.digest, "seconds": time.perf_counter() - start}
    finally:
        training.close()


def corpus_of(options: Options) -> Corpus:
    """The text of a run."""
    return load(Path(options.text) if options.text else None, options.characters, options.context, options.skip)


def weights_of(options: Options) -> dict[str, Tensor] | None:
    """Return the weights that a run begins with; None: random ones."""
    return None if options.weights is None else read_weights(options.weights, options.shape)


def save_weights(training: Training, path: Path, writes: bool) -> None:
    """Write the whole model's weights, on the rank that `writes`; collective."""
    weights = training.weights()
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, path)


def record(training: Training, epochs: Sequence[Record]) -> Record:
    """Return the record of a run; collective."""
    found = training.magnitudes
    sizes = {} if found is None else {"activations": found.activations, "changes": found.changes}
    return {
        "name": training.options.name,
        "options": asdict(training.options),
        "epochs": list(epochs),
        "losses": training.losses,
        "most_alive": training.stage.most_alive,
        "cuts_alike": training.stage.stores_alike(),
        **sizes,
    }
