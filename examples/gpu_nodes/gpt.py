"""A small GPT on bytes, text to train it on, and options: they stand for the model and the data of your program."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpicomp import Communicator

SYMBOLS = 256
QUIET_S = 5.0  # between lines that show how far a training is


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next layer's input."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        moved: Tensor = x + self.mlp(self.norm_2(x))
        return moved


class GPT(nn.Module):
    """A GPT whose forward returns the loss of the next bytes."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss of each byte but the first, in nats."""
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class Text:
    """Batches of the text of Python's standard library, other ones on each rank."""

    def __init__(self, rank: int, context: int, batch: int, device: torch.device) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self._bytes = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self._random, self._shape = torch.Generator().manual_seed(rank), (batch, context + 1)
        self._device = device

    def batch(self) -> Tensor:
        """Return the next batch, on the device."""
        n, length = self._shape
        starts = torch.randint(len(self._bytes) - length, (n,), generator=self._random)
        rows = torch.stack([self._bytes[at : at + length] for at in starts.tolist()])
        return rows.to(self._device, torch.int64)


def options(description: str) -> argparse.Namespace:
    """Return the options that the programs share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="examples of a micro-batch, on each rank")
    parser.add_argument("--dense", action="store_true", help="send float32 between nodes, for comparison")
    help_text = "neighbours that count as a node, to try it on one machine; 0: the hosts are the nodes"
    parser.add_argument("--ranks-per-node", type=int, default=0, help=help_text)
    return parser.parse_args()


def count_steps(steps: int, comm: Communicator) -> Iterator[int]:
    """Yield the steps' numbers; rank 0 shows at once, and every few seconds, how many are made."""
    shown_at = 0.0
    for made in range(steps):
        if comm.rank == 0 and time.monotonic() - shown_at >= QUIET_S:
            print(f"{comm.size} ranks, step {made} of {steps}", file=sys.stderr, flush=True)
            shown_at = time.monotonic()
        yield made


def report(loss: Tensor, steps: int, sent: int) -> None:
    """Print the loss, and the bytes that rank 0 has sent to other nodes."""
    print(f"loss {loss.item():.2f} after {steps} steps; rank 0 sent {sent / 1e6:.2f} MB to other nodes", flush=True)
