"""A small transformer over bytes, as a load for benchmarks."""

from __future__ import annotations

from torch import Tensor, nn


class Transformer(nn.Module):
    """Six layers of width 384: 11 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 384), nn.Linear(384, 256)
        layer = nn.TransformerEncoderLayer(384, 6, 1536, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.layers(self.embed(tokens), mask, is_causal=True))
        return logits
