"""Stages whose ranks are threads of one process train as those of processes do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.threads.run_local import run_local
from mpicomp.codecs import RowQuantizer
from mpicomp.pipeline import Deltas, Direct, PipelineError, PipelineStage

STAGES, EXAMPLES, WIDTH, STEPS = 3, 8, 6, 4


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(EXAMPLES, WIDTH, generator=generator), torch.randn(EXAMPLES, WIDTH, generator=generator)


def train(modules: list[nn.Linear], **options: Any) -> list[list[Tensor]]:
    """Gradients of each step, by stage."""
    inputs, targets = data()

    def rank(comm: Communicator) -> tuple[list[Tensor], bool]:
        module, last = modules[comm.rank], comm.rank == STAGES - 1
        loss = nn.functional.mse_loss if last else None
        stage = PipelineStage(module, comm, 4, loss=loss, **options)
        gradients = []
        for _ in range(STEPS):
            module.zero_grad()
            stage.step(inputs if comm.rank == 0 else None, targets if last else None, np.arange(EXAMPLES))
            assert module.weight.grad is not None
            gradients.append(module.weight.grad.clone())
            with torch.no_grad():
                module.weight -= 0.1 * module.weight.grad
        return gradients, stage.stores_alike()

    found = run_local(STAGES, rank)
    assert all(alike for _, alike in found)
    return [gradients for gradients, _ in found]


def test_gradients_are_those_of_one_process() -> None:
    found = train(layers())
    whole = layers()
    inputs, targets = data()
    for step in range(STEPS):
        for module in whole:
            module.zero_grad()
        for given, wanted in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            torch.autograd.backward(nn.functional.mse_loss(nn.Sequential(*whole)(given), wanted) / 4)
        for stage, module in enumerate(whole):
            assert module.weight.grad is not None
            assert torch.equal(found[stage][step], module.weight.grad)
            with torch.no_grad():
                module.weight -= 0.1 * module.weight.grad


@pytest.mark.parametrize("stored", [None, RowQuantizer(8)])
def test_messages_in_few_bits_bring_nearly_the_same_gradients(stored: RowQuantizer | None) -> None:
    full = train(layers())
    coded = train(
        layers(),
        forward=Deltas(RowQuantizer(6), EXAMPLES, stored=stored),
        backward=Direct(RowQuantizer(8, scale="float32")),
    )
    differ = [
        float((one - other).norm() / other.norm())
        for stages in zip(coded, full, strict=True)
        for one, other in zip(*stages, strict=True)
    ]
    assert 0 < max(differ) < 0.1


def test_an_error_of_one_thread_is_raised_by_the_run() -> None:
    modules: list[Any] = layers()
    modules[1] = nn.Linear(WIDTH + 1, WIDTH)
    with pytest.raises(PipelineError, match=r"stage 1: RuntimeError: mat1 and mat2"):
        train(modules)
