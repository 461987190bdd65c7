"""Servers and clients of split learning, for its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp.pipeline import SplitClient, SplitServer

CLIENTS, EXAMPLES, WIDTH, BATCH = 3, 8, 6, 4
FIRST, MIDDLE, LAST = range(3)
Party = SplitClient | SplitServer


class Layer(nn.Module):
    """A layer that fails, or returns another value, on request."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.ruin: Callable[[Tensor], Tensor] | None = None
        self.fails_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        out: Tensor = self.inner(x)
        if self.fails_backward:
            out.register_hook(fail)
        return out if self.ruin is None else self.ruin(out)


def fail(_: Tensor) -> Tensor:
    raise ValueError("no layer today")


def data(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    return torch.randn(EXAMPLES, WIDTH, generator=generator), torch.randn(EXAMPLES, WIDTH, generator=generator)


def batches() -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    yield from (np.arange(EXAMPLES)[start::2] for start in range(2))


def made(comm: Communicator, last: nn.Module | None = None, **options: Any) -> Party:
    if comm.rank == 0:
        return SplitServer(Layer(MIDDLE), comm, CLIENTS, **options)
    return SplitClient(Layer(FIRST), last or Layer(LAST), comm, CLIENTS, loss=nn.functional.mse_loss, **options)


def layers(party: Party) -> list[Layer]:
    found = [party.middle] if isinstance(party, SplitServer) else [party.first, party.last]
    return [one for one in found if isinstance(one, Layer)]


def optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for module in modules for one in module.parameters()], lr=0.5)


def train_turn(party: Party, client: int) -> list[float]:
    """One pass over a client's examples; returns the losses that this rank knows."""
    losses, steps = [], optimizer(*layers(party))
    with party.turn(client) as takes_part:
        if isinstance(party, SplitServer):
            while party.serve():
                steps.step()
                steps.zero_grad()
        elif takes_part:
            inputs, targets = data(client)
            for ids in batches():
                losses.append(party.step(inputs[ids], targets[ids], ids))
                steps.step()
                steps.zero_grad()
    return losses


def one_step(party: Party, client: int = 0, **changed: Any) -> float | None:
    """A step of a turn of its own; the gradients stay."""
    loss = None
    with party.turn(client) as takes_part:
        if isinstance(party, SplitServer):
            assert party.serve()
            assert not party.serve()
        elif takes_part:
            inputs, targets = data(client)
            batch: dict[str, Any] = {"inputs": inputs, "targets": targets, "ids": np.arange(EXAMPLES)} | changed
            loss = party.step(**batch)
    return loss


def prediction(party: Party, client: int, inputs: Tensor) -> Tensor | None:
    """Return the client's error in a turn of its own; None on other ranks."""
    with party.turn(client) as takes_part:
        if isinstance(party, SplitServer):
            assert not party.serve()
        elif takes_part:
            return party.predict(inputs)
    return None


def visits(party: Party) -> dict[tuple[int, int], list[int]]:
    """Return the number of passes of the examples of each client's cuts."""
    cuts = party.state_dict()["cuts"]
    stores = {(client, cut): both[cut]["activations"]["store"] for client, both in cuts.items() for cut in range(2)}
    return {place: [] if store is None else store["stamps"].tolist() for place, store in stores.items()}


def in_turn(party: Party) -> bool:
    """Return whether this rank takes part in the turns of client 0."""
    return isinstance(party, SplitServer) or party.has(0)
