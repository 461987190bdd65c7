"""Runs of each method, on a tiny transformer's stand-in."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn

from apps.finetune.methods import METHODS, RATES, Averaged, groups, schedule
from apps.finetune.pretrained import Classifier, Encoded
from apps.finetune.training import BATCH, Run, batches, score, train
from collectives import Communicator
from collectives.threads.run_local import run_local
from mpicomp import Dense

N_LABELS, N_TOKENS, WIDTH = 3, 50, 64


class Encoder(nn.Module):
    """Embeddings and a norm: what a transformer has, without its layers."""

    @dataclasses.dataclass
    class Output:
        """Output of a transformer."""

        last_hidden_state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.LayerNorm = nn.Embedding(N_TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        nn.init.normal_(self.embeddings.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
        return self.Output(self.LayerNorm(self.embeddings(input_ids)))


def tiny(seed: int) -> nn.Module:
    return Classifier(Encoder(), WIDTH, N_LABELS, seed)


def data(n: int, seed: int) -> Encoded:
    """Return texts of four tokens, each of which determines the label."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(N_LABELS, (n,), generator=random)
    tokens = 1 + labels[:, None] + N_LABELS * torch.randint(16, (n, 6), generator=random)
    tokens[:, 4:] = 0
    return Encoded(tokens, labels)


def test_every_method_has_a_rate() -> None:
    assert METHODS.keys() == RATES.keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_step_of_each_method_changes_the_models_of_all_ranks_alike(name: str) -> None:
    def rank(comm: Communicator) -> list[list[Tensor]]:
        model = tiny(0)
        found = [[parameter.detach().clone() for parameter in model.parameters()]]
        optimizer = METHODS[name].start(model, comm, 0.01, 4)
        examples = data(200, 1)
        for batch in itertools.islice(batches(len(examples), comm, 0), 4):  # OneBitAdam's second one is compressed
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(examples.tokens[batch]), examples.labels[batch]).backward()
            optimizer.step()
            found.append([parameter.detach().clone() for parameter in model.parameters()])
        return found

    first, second = run_local(2, rank, "ring")
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    for before, after in itertools.pairwise(first):
        assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_run_learns_and_is_the_same_each_time() -> None:
    run = Run(Averaged(Dense()), 0.05, 3, 40)
    found, again = (train(run, tiny, data(300, 1), data(90, 2)) for _ in range(2))
    assert {**found, "seconds": 0} == {**again, "seconds": 0}
    assert found["steps"] == [10, 20, 30, 40]
    assert found["train_loss"][0] > found["train_loss"][-1]
    assert found["accuracy"][-1] > 0.9
    assert found["bits_per_element"] == pytest.approx(32, rel=0.1)


def test_a_run_that_diverges_is_told_and_scores_least() -> None:
    found = train(Run(Averaged(Dense()), float("inf"), 0, 5), tiny, data(100, 1), data(30, 2))
    assert found == {"diverged": True}
    assert score(found) < score({"diverged": False, "loss": [9.0]})


def test_the_ranks_see_different_examples_in_an_order_of_the_seed() -> None:
    def first(comm: Communicator, seed: int) -> list[int]:
        return torch.cat(list(itertools.islice(batches(100, comm, seed), 3))).tolist()

    ranks = run_local(2, lambda comm: first(comm, 0))
    assert len({*ranks[0], *ranks[1]}) == 2 * 3 * BATCH
    assert ranks == run_local(2, lambda comm: first(comm, 0)) != run_local(2, lambda comm: first(comm, 1))


def test_padding_does_not_change_scores() -> None:
    model, examples = tiny(0), data(5, 1)
    assert torch.allclose(model(examples.tokens), model(examples.tokens[:, :4]))


def test_the_rate_rises_and_then_falls_to_zero_behind_the_last_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = schedule(optimizer, 20), []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] == pytest.approx(1 / 18)
    assert optimizer.param_groups[0]["lr"] == 0


def test_only_matrices_decay() -> None:
    decaying, others = groups(tiny(0))
    assert "weight_decay" not in decaying
    assert others["weight_decay"] == 0
    assert [one.ndim for one in others["params"]] == [1, 1, 1]
