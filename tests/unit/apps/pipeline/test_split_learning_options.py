"""Options of runs of split learning, and how clients' labels are skewed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from apps.pipeline.split.network import Parts, mirror
from apps.pipeline.split.options import METHODS, Options, parse
from apps.pipeline.split.partition import dirichlet
from mpicomp.codecs.rows import RowQuantizer, TopRows
from mpicomp.pipeline import Deltas, Direct

LABELS = np.repeat(np.arange(10), 100)


def shares(concentration: float, seed: int = 0, least: int = 1) -> list[np.ndarray]:
    return dirichlet(LABELS, 16, concentration, np.random.default_rng(seed), least=least)


def largest_class(clients: list[np.ndarray]) -> float:
    """Part of a client's examples that have its most frequent label, on the mean."""
    return float(np.mean([np.bincount(LABELS[examples]).max() / examples.size for examples in clients]))


@pytest.mark.parametrize("concentration", [0.1, 0.5, 100.0])
def test_each_example_is_one_clients(concentration: float) -> None:
    clients = shares(concentration)
    assert len(clients) == 16
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(LABELS.size))
    assert min(examples.size for examples in clients) >= 1


def test_labels_are_the_more_skewed_the_less_the_concentration() -> None:
    skews = [np.mean([largest_class(shares(one, seed)) for seed in range(5)]) for one in (0.2, 0.5, 2.0, 1000.0)]
    assert skews == sorted(skews, reverse=True)
    assert skews[1] > 0.3  # the paper's
    assert skews[3] < 0.15  # a tenth each


def test_shares_have_the_mean_and_the_variance_of_the_distribution() -> None:
    clients, concentration = 4, 0.5
    found = [
        [np.mean(LABELS[examples] == 0) * examples.size / 100 for examples in dirichlet(
            LABELS, clients, concentration, np.random.default_rng(seed), least=0
        )]
        for seed in range(300)
    ]  # fmt: skip
    mean = 1 / clients
    assert np.allclose(np.mean(found, axis=0), mean, atol=0.05)
    assert np.var(found) == pytest.approx(mean * (1 - mean) / (clients * concentration + 1), rel=0.2)


def test_shares_depend_on_the_seed_alone() -> None:
    assert all(np.array_equal(*pair) for pair in zip(shares(0.5), shares(0.5), strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(shares(0.5), shares(0.5, seed=1), strict=True))


def test_every_client_has_the_least_number_of_examples_or_there_are_too_few() -> None:
    assert min(examples.size for examples in shares(0.5, least=40)) >= 40
    with pytest.raises(ValueError, match="1000 examples are not shared out so that each of 16 clients has 63"):
        shares(0.5, least=63)


def test_defaults_of_the_command_line_are_a_run_of_each_method() -> None:
    assert parse([]).runs == [Options(method=method) for method in METHODS]


def test_options_of_the_command_line_are_taken() -> None:
    found = parse(["--methods", "aq-sgd", "--rounds", "3", "--clients=4", "--forward-bits=3", "--kept=1", "--flip"])
    assert found.runs == [Options(rounds=3, clients=4, forward_bits=3, kept=1.0, flip=True)]


@pytest.mark.parametrize(
    "wrong", ["--kept=0", "--kept=1.5", "--lr=0", "--concentration=-1", "--rounds=0", "--clients=x", "--data=x"]
)
def test_options_that_cannot_be_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([wrong])
    assert wrong.split("=")[0] in capsys.readouterr().err


def test_methods_choose_what_travels() -> None:
    fp32, direct, deltas = (Options(method=method) for method in METHODS)
    assert (fp32.forward(9), fp32.backward(), fp32.name) == (Direct(), Direct(), "fp32")
    assert (direct.forward(9), direct.name) == (Direct(RowQuantizer(2)), "DirectQ fw2 bw8[0.2]")
    assert (deltas.forward(9), deltas.name) == (Deltas(RowQuantizer(2), 9), "AQ-SGD fw2 bw8[0.2]")
    assert direct.backward() == deltas.backward() == Direct(TopRows(0.2, RowQuantizer(8, scale="float32")))
    assert Options(kept=1.0).backward() == Direct(RowQuantizer(8, scale="float32"))


def test_the_learning_rate_falls_to_a_tenth_every_twenty_rounds() -> None:
    assert [Options().rate(number) for number in (0, 19, 20, 40)] == pytest.approx([0.01, 0.01, 0.001, 0.0001])


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (3, 9, 7)])
def test_the_parts_of_the_network_fit_together(shape: tuple[int, int, int]) -> None:
    parts = Parts(shape, 10, seed=1)
    activations = parts.first()(torch.randn(5, *shape))
    assert activations.shape == (5, 8, (shape[1] // 2) * (shape[2] // 2))
    assert parts.last()(parts.middle()(activations)).shape == (5, 10)
    again = Parts(shape, 10, seed=1)
    for one, other in ((parts.first(), again.first()), (parts.middle(), again.middle()), (parts.last(), again.last())):
        assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def test_images_are_mirrored_left_to_right_where_told() -> None:
    images = torch.arange(8.0).reshape(2, 1, 2, 2)
    found = mirror(images, torch.tensor([False, True]))
    assert found.reshape(2, 4).tolist() == [[0, 1, 2, 3], [5, 4, 7, 6]]
