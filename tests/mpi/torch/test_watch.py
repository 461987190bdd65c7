"""Diagnostics of a training: measurements, audits, and a warning before it diverges."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp import Dense, DoubleSqueeze, EFSignSGD, LocalTopK, Marsit, Relay, SparseLoCo, run_local
from mpicomp.torch import DistributedOptimizer, OneBitAdam, ZeroOneAdam
from mpicomp.torch.watch import RUN, RUNS, growing_window, sampled
from tests.mpi.lanes import few_ranks
from tests.mpi.torch.training import make_model, parameters_of, train, wrap, wrapped

pytestmark = few_ranks

PLANS: dict[str, dict[str, Any]] = {
    "gradients": {"synchronize": "gradients"},
    "without overlap": {"synchronize": "gradients", "overlap": False},
    "updates": {"synchronize": "updates"},
    "updates with overlap": {"synchronize": "updates", "overlap": True},
    "late": {"synchronize": "updates", "local_steps": 3, "delay": 1, "fragments": 2},
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@plans
@pytest.mark.parametrize("algorithm", [Dense(), Marsit(5), Relay(), DoubleSqueeze()], ids=str)
def test_a_training_is_the_same_to_the_bit_with_and_without_a_look_at_it(
    algorithm: Any, plan: Any, comm: Communicator
) -> None:
    (model, optimizer), (alone, without) = (wrapped(algorithm, comm, **plan) for _ in range(2))
    for step in range(9):
        train(model, optimizer, comm, range(step, step + 1))
        optimizer.diagnostics(every=2, audit_every=3)
    train(alone, without, comm, range(9))
    assert torch.equal(parameters_of(model), parameters_of(alone))


def vectors(comm: Communicator, algorithm: Any, **plan: Any) -> tuple[torch.nn.Parameter, DistributedOptimizer]:
    """One tensor that is averaged as a whole."""
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 4096))
    return weights, DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), algorithm, comm, **plan)


@pytest.mark.parametrize("mode", ["gradients", "updates"])
@pytest.mark.parametrize("algorithm", [Relay(16), DoubleSqueeze(), LocalTopK(rate=16), Marsit(None)], ids=str)
def test_norms_and_cosine_are_those_of_the_whole_vectors(algorithm: Any, mode: str, comm: Communicator) -> None:
    weights, optimizer = vectors(comm, algorithm, synchronize=mode)
    own = torch.Generator().manual_seed(comm.rank)
    for step in range(6):
        gradient = torch.randn(4096, generator=own)
        before = weights.detach().clone()
        weights.grad = gradient.clone()
        optimizer.step()
        found = optimizer.diagnostics(every=1, audit_every=1)
        if step == 0:  # the vectors were laid out in this step
            assert np.isnan([found.update_norm, found.residual_norm, found.cosine]).all()
            continue
        mean = (before - weights.detach()).double()
        exact = torch.from_numpy(comm.allreduce(gradient.double().numpy(), "mean"))
        residual = optimizer.aggregators[0].residual
        assert found.update_norm == pytest.approx(mean.norm().item(), rel=1e-4)
        assert found.residual_norm == pytest.approx(np.linalg.norm(residual), rel=1e-5)
        assert found.residual_ratio == pytest.approx(np.linalg.norm(residual) / mean.norm().item(), rel=1e-4)
        assert found.cosine == pytest.approx(torch.cosine_similarity(mean, exact, dim=0).item(), abs=1e-4)
        assert found.audits == step
        everywhere = comm.allgather_object((found.update_norm, found.cosine))
        assert all(one == everywhere[0] for one in everywhere)
    assert np.isnan(found.clipped_share) == (not isinstance(algorithm, Marsit))


def test_marsit_counts_the_elements_that_it_clips(comm: Communicator) -> None:
    model, optimizer = wrapped(Marsit(None), comm)
    train(model, optimizer, comm, range(3))
    found = optimizer.diagnostics()
    assert 0 <= found.clipped_share <= 1
    assert np.isnan(found.cosine)
    assert found.audits == 0


def test_samples_estimate_the_norm_of_long_vectors() -> None:
    values = np.random.default_rng(0).standard_normal(1_000_003).astype(np.float32)
    for of_kind in (values, torch.from_numpy(values), torch.from_numpy(values).bfloat16()):
        sample = sampled(of_kind)
        assert sample.shape == (RUNS * RUN,)
        assert np.linalg.norm(sample) == pytest.approx(np.linalg.norm(values), rel=0.05)
    assert np.array_equal(sampled(values[:100]), values[:100].astype(np.float64))


def test_buckets_of_a_state_and_parameters_that_join_are_watched_too(comm: Communicator) -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    watched = wrap(model, EFSignSGD(), comm)
    train(model, watched, comm, range(2))
    watched.diagnostics(every=1)
    train(model, watched, comm, range(2, 3))
    before = watched.diagnostics().residual_norm
    model[0].weight.requires_grad_(True)
    train(model, watched, comm, range(3, 4))
    watched.diagnostics()
    train(model, watched, comm, range(4, 5))
    assert watched.diagnostics().residual_norm > before
    of_state = copy.deepcopy(watched.state_dict())
    again = wrap(make_model(), EFSignSGD(), comm)
    again.diagnostics(every=1)
    again.load_state_dict(of_state)
    again.diagnostics()
    train(model, again, comm, range(1))
    assert again.diagnostics().residual_norm > 0


def test_one_bit_adam_is_watched(comm: Communicator) -> None:
    model = make_model()
    adam = OneBitAdam(model.parameters(), comm=comm, warmup_steps=3)
    for step in range(8):
        train(model, adam, comm, range(step, step + 1))
        found = adam.diagnostics(every=1)
    assert found.residual_norm > 0


def test_zero_one_adam_is_watched_in_its_exact_and_in_its_compressed_steps(comm: Communicator) -> None:
    model = make_model()
    adam = ZeroOneAdam(model.parameters(), comm=comm, warmup_steps=40, variance_doubling=2)
    norms = []
    for step in range(9):  # exact are the steps 0, 1, 3, 5, 7
        train(model, adam, comm, range(step, step + 1))
        norms.append(adam.diagnostics(every=1).update_norm)
    assert np.flatnonzero(np.isnan(norms)).tolist() == [0, 2]  # a watch begins after the first step of its kind


WRONG = {
    "every": ({"every": 0}, "every is 0; choose a whole number, 1 or more"),
    "audits": ({"audit_every": -1}, "audit_every is -1; choose a whole number, 0 or more"),
    "text": ({"every": "2"}, "every is '2'"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_numbers_are_refused_on_all_ranks(options: Any, message: str, comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    with pytest.raises(ValueError, match=rf"^rank \d of \d: {message}"):
        optimizer.diagnostics(**options)
    optimizer.diagnostics(every=3)
    with pytest.raises(ValueError, match=r"every=4 .* differ from those of the first call, \(3, 0\); leave them out"):
        optimizer.diagnostics(every=4)
    train(model, optimizer, comm, range(2))


@pytest.mark.mpi(min_size=2)
def test_an_audit_that_a_rank_misses_is_a_mismatch(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, overlap=False)
    train(model, optimizer, comm, range(1))
    optimizer.diagnostics(audit_every=1)
    train(model, optimizer, comm, range(1, 2))
    call = optimizer.diagnostics if comm.rank else lambda: train(model, optimizer, comm, range(2, 3))
    with pytest.raises(CollectiveMismatch, match="allreduce"):
        call()


def quadratic(comm: Communicator, algorithm: Any, lr: float, steps: int, **options: Any) -> list[str]:
    """Train on a bowl with momentum 0.9, with noise on each rank; return the texts of the warnings."""
    generator, curvature = torch.Generator().manual_seed(100 + comm.rank), torch.linspace(0.05, 1, 1024)
    target = torch.randn(1024, generator=torch.Generator().manual_seed(5))
    weights = torch.nn.Parameter(torch.zeros(1024))
    sgd = torch.optim.SGD([weights], lr=lr, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, algorithm, comm, [("bowl", weights)], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            weights.grad = curvature * (weights.detach() - target - 0.3 * torch.randn(1024, generator=generator))
            optimizer.step()
            optimizer.diagnostics(every=1)
    return [str(one.message) for one in caught if "diverge" in str(one.message)]


@pytest.mark.parametrize(
    ("algorithm", "lr"), [(Relay(2), 0.3), (Relay(4), 0.3), (Relay(16), 1.0)], ids=["2 levels", "4 levels", "16 levels"]
)
@pytest.mark.mpi(min_size=2)  # one rank rounds nothing
def test_a_training_that_diverges_is_warned_of_once_while_it_is_finite(
    algorithm: Any, lr: float, comm: Communicator
) -> None:
    found = quadratic(comm, algorithm, lr, 100, synchronize="gradients")
    assert len(found) == 1
    assert "the residual of 'bowl' and its bucket has doubled three times, every " in found[0]
    assert "lower the learning rate" in found[0]


HEALTHY: dict[str, tuple[Any, float, str]] = {
    "relay": (Relay(), 0.03, "updates"),
    "relay of gradients": (Relay(16), 0.03, "gradients"),
    "double_squeeze": (DoubleSqueeze(), 0.003, "gradients"),
    "local_top_k": (LocalTopK(rate=8), 0.003, "gradients"),
    "marsit": (Marsit(50), 0.03, "updates"),
    "ef_signsgd": (EFSignSGD(), 0.003, "gradients"),
}


@pytest.mark.parametrize(("algorithm", "lr", "mode"), HEALTHY.values(), ids=HEALTHY)
def test_trainings_that_converge_are_not_warned_of(algorithm: Any, lr: float, mode: Any, comm: Communicator) -> None:
    assert quadratic(comm, algorithm, lr, 150, synchronize=mode) == []


@pytest.mark.parametrize("algorithm", [Relay(), DoubleSqueeze(), LocalTopK(rate=16), SparseLoCo(16, 64)], ids=str)
def test_networks_that_learn_are_not_warned_of(algorithm: Any, comm: Communicator) -> None:
    model, optimizer = wrapped(algorithm, comm)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for step in range(80):
            train(model, optimizer, comm, range(step, step + 1))
            optimizer.diagnostics(every=1)


@pytest.mark.parametrize("norm", [lambda t: t, lambda t: t**0.5, lambda t: 1 - 0.9**t, lambda t: 2.0 + np.sin(t)])
def test_growth_that_is_not_geometric_is_none(norm: Any) -> None:
    logs = [float(np.log(norm(t))) for t in range(1, 257)]
    assert not any(growing_window(logs[:t]) for t in range(257))


@pytest.mark.parametrize(("factor", "window"), [(1.2, 4), (1.1, 8), (1.03, 32), (1.012, 64), (1.0, 0), (0.9, 0)])
def test_geometric_growth_is_found_by_the_shortest_windows_in_which_it_doubles(factor: float, window: int) -> None:
    assert growing_window([t * np.log(factor) for t in range(256)]) == window


def test_ranks_as_threads_are_watched() -> None:
    def look(comm: Communicator) -> float:
        _, optimizer = vectors(comm, EFSignSGD())
        for _ in range(3):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(4096) * (comm.rank + 1)
            optimizer.step()
            found = optimizer.diagnostics(every=1, audit_every=1)
        return found.cosine

    first, second = run_local(2, look)
    assert first == second > 0.99
