"""Islands: gradients averaged within them at every step, updates between them after local steps."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CollectiveError, CollectiveMismatch
from collectives.nodes.layout import NodeLayout
from mpicomp import Dense, DoubleSqueeze, Marsit, PerNode, Relay, SparseLoCo, run_local
from mpicomp.algorithms.per_island import Islands
from mpicomp.torch import DistributedOptimizer, broadcast_parameters, redistribute_states, require_same
from mpicomp.torch.local_steps.islands import IslandGradients
from mpicomp.torch.parameters import NamedParameter
from tests.mpi.lanes import up_to_four_ranks
from tests.mpi.torch.training import batch, make_model, on_all_ranks, parameters_of, same_on_all_ranks, train, wrap

pytestmark = up_to_four_ranks

DENSE = Dense()
CARRIERS: dict[str, Any] = {
    "dense": DENSE, "marsit": Marsit(10), "sparse_loco": SparseLoCo(16, 64), "double_squeeze": DoubleSqueeze(),
    "relay": Relay(),
}  # fmt: skip
PLANS: list[dict[str, Any]] = [
    {"local_steps": 3},
    {"local_steps": 4, "fragments": 2, "delay": 1},
    {"local_steps": 4, "fragments": 2, "delay": 3, "blend": "steps"},
]


def islands_of(comm: Communicator, ranks: int = 2) -> Communicator:
    """The part of this rank, of `ranks` neighbours; the last part may be smaller."""
    part = comm.split(comm.rank // ranks)
    assert part is not None
    return part


def wrapped(
    model: nn.Module, comm: Communicator, islands: Communicator | None, algorithm: Any = DENSE, **options: Any
) -> DistributedOptimizer:
    return wrap(model, algorithm, comm, synchronize="updates", islands=islands, **options)


def island_mean_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], step: int) -> None:
    """Step with the mean of these ranks' gradients, each computed here."""
    optimizer.zero_grad()
    for rank in ranks:
        inputs, labels = batch(1000 * rank + step)
        (nn.functional.cross_entropy(model(inputs), labels) / len(ranks)).backward()
    optimizer.step()


@pytest.mark.parametrize("outer", [None, (0.7, 0.6)])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_ranks_go_the_way_of_one_optimizer_for_each_island(local_steps: int, outer: Any, comm: Communicator) -> None:
    """Of exact means: every island trains as one rank would on its ranks' gradients; islands count by their ranks."""
    model, alone = make_model(), make_model()
    with islands_of(comm) as island:
        optimizer = wrapped(model, comm, island, local_steps=local_steps, outer=outer)
        ranks = [rank for rank in range(comm.size) if rank // 2 == comm.rank // 2]
        inner = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
        x, b = parameters_of(alone), torch.zeros_like(parameters_of(alone))
        eta, mu = outer or (1.0, 0.0)
        for step in range(2 * local_steps + 1):
            train(model, optimizer, comm, range(step, step + 1))
            island_mean_gradients(alone, inner, ranks, step)
            if (step + 1) % local_steps == 0:
                mean = torch.stack(on_all_ranks(x - parameters_of(alone), comm)).mean(0)
                b = mu * b + mean
                x = x - eta * (mean + mu * b)
                nn.utils.vector_to_parameters(x.clone(), alone.parameters())
            torch.testing.assert_close(parameters_of(model), parameters_of(alone))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("algorithm", CARRIERS.values(), ids=CARRIERS)
def test_ranks_of_an_island_are_equal_to_the_bit_at_any_time(algorithm: Any, plan: Any, comm: Communicator) -> None:
    model = make_model()
    with islands_of(comm) as island:
        optimizer = wrapped(model, comm, island, algorithm, optimizer="adam", outer=(0.7, 0.6), **plan)
        for step in range(9):
            train(model, optimizer, comm, range(step, step + 1))
            assert same_on_all_ranks(model, island)
            with optimizer.common_model():
                assert same_on_all_ranks(model, comm)
        optimizer.synchronize()
        assert same_on_all_ranks(model, comm)


def test_each_rank_carries_its_share_of_a_vector(comm: Communicator) -> None:
    model = nn.Linear(256, 256)
    broadcast_parameters(model, comm)
    with islands_of(comm) as island:
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = DistributedOptimizer(sgd, Marsit(None), comm, local_steps=2, islands=island)
        for _ in range(2):
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
        (aggregator,) = optimizer.aggregators
        n_islands, smallest = -(-comm.size // 2), 1 if comm.size % 2 else 2
        shares = comm.allgather_object((aggregator.residual.size, comm.rank % 2))
        if comm.size > 1 and n_islands > 1:
            assert sum(size for size, _ in shares[:2]) == aggregator.n
            assert all((size > 0) == (place < smallest) for size, place in shares)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("algorithm", CARRIERS.values(), ids=CARRIERS)
def test_islands_of_one_rank_are_ranks_without_islands(algorithm: Any, plan: Any, comm: Communicator) -> None:
    models = [make_model(), make_model()]
    with islands_of(comm, 1) as island:
        for model, part in zip(models, (island, None), strict=True):
            optimizer = wrapped(model, comm, part, algorithm, outer=(0.7, 0.6), **plan)
            train(model, optimizer, comm, range(6))
    assert torch.equal(*map(parameters_of, models))


@pytest.mark.mpi(min_size=2)  # one rank in an island of its own runs the method
@pytest.mark.parametrize("algorithm", CARRIERS.values(), ids=CARRIERS)
def test_a_single_island_is_the_plain_loop_whatever_the_algorithm(algorithm: Any, comm: Communicator) -> None:
    model, plain = make_model(), make_model()
    optimizer = wrapped(model, comm, comm, algorithm, local_steps=2)
    inner = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    train(model, optimizer, comm, range(6))
    for step in range(6):
        island_mean_gradients(plain, inner, [*range(comm.size)], step)
    torch.testing.assert_close(parameters_of(model), parameters_of(plain))


@pytest.mark.parametrize("at", [4, 5], ids=["after a round", "in a round"])
@pytest.mark.parametrize("algorithm", CARRIERS.values(), ids=CARRIERS)
def test_training_resumes_to_the_bit(algorithm: Any, at: int, comm: Communicator) -> None:
    model = make_model()
    with islands_of(comm) as island:
        optimizer = wrapped(model, comm, island, algorithm, local_steps=2, outer=(0.7, 0.9))
        train(model, optimizer, comm, range(at))
        parameters, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, comm, range(at, 10))
        resumed = make_model(seed=5)
        again = wrapped(resumed, comm, island, algorithm, local_steps=2, outer=(0.7, 0.9))
        resumed.load_state_dict(parameters)
        again.check_state_dict(state)
        again.load_state_dict(state)
        train(resumed, again, comm, range(at, 10))
    assert torch.equal(parameters_of(resumed), parameters_of(model))


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize(("ranks", "of_island"), [(2, 1), (2, 2), (6, 3)])
@pytest.mark.parametrize("algorithm", [Marsit(), SparseLoCo(16, 64), Relay()], ids=["marsit", "sparse_loco", "relay"])
def test_other_ranks_in_other_islands_go_on(algorithm: Any, ranks: int, of_island: int, comm: Communicator) -> None:
    models = [make_model() for _ in range(6)]
    one_by_one = {"bucket_mb": 0.001}

    def save(comm: Communicator) -> Any:
        model = models[comm.rank]
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = DistributedOptimizer(
            sgd, algorithm, comm, local_steps=2, outer=(0.7, 0.9), islands=islands_of(comm), **one_by_one
        )
        train(model, optimizer, comm, range(4))
        return optimizer.state_dict()

    states = run_local(4, save)
    others = redistribute_states(states, ranks)
    common = parameters_of(models[0])

    def resume(comm: Communicator) -> bool:
        model = models[comm.rank]
        nn.utils.vector_to_parameters(common.clone(), model.parameters())
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = DistributedOptimizer(
            sgd, algorithm, comm, local_steps=2, outer=(0.7, 0.9), islands=islands_of(comm, of_island), **one_by_one
        )
        optimizer.load_state_dict(others[comm.rank])
        train(model, optimizer, comm, range(4, 8))
        require_same(model, comm)
        return optimizer.synchronizations == 4 and bool(parameters_of(model).isfinite().all())

    assert all(run_local(ranks, resume))


def test_missing_gradients_are_zeros_for_the_whole_island(comm: Communicator) -> None:
    model = make_model()
    with islands_of(comm) as island:
        optimizer = wrapped(model, comm, island, Marsit(), local_steps=2)
        for seed in optimizer.join(range(2 + 2 * comm.rank)):
            inputs, labels = batch(seed)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        optimizer.synchronize()
        assert optimizer.synchronizations == comm.size
        assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_scaler_sees_the_mean_of_the_island(dtype: torch.dtype, comm: Communicator) -> None:
    models = [make_model(dtype=dtype), make_model(dtype=dtype)]
    with islands_of(comm) as island:
        for model, scale in zip(models, (1.0, 1024.0), strict=True):
            optimizer = wrapped(model, comm, island, local_steps=2)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
            for step in range(6):
                inputs, labels = batch(1000 * comm.rank + step, dtype)
                optimizer.zero_grad()
                scaler.scale(nn.functional.cross_entropy(model(inputs), labels)).backward()
                scaler.step(optimizer)
                scaler.update()
                assert same_on_all_ranks(model, island)
    torch.testing.assert_close(*map(parameters_of, models))


def test_wrong_islands_are_refused_with_the_cure(comm: Communicator) -> None:
    model = make_model()
    with pytest.raises(TypeError, match=r"islands is of type int: pass the communicator of .* comm.nodes.local"):
        wrapped(model, comm, 2)
    with pytest.raises(ValueError, match=r"islands cannot be combined with PerNode\(.*: pass Marsit\("):
        wrapped(model, comm, comm, PerNode(Marsit()))
    with pytest.raises(ValueError, match="islands cannot be combined with LBFGS"):
        DistributedOptimizer(torch.optim.LBFGS(model.parameters()), DENSE, comm, synchronize="updates", islands=comm)
    with islands_of(comm) as island:
        pass
    with pytest.raises(ValueError, match="islands cannot be used, it was closed: pass a communicator that is open"):
        wrapped(model, comm, island)
    for options in ({"synchronize": "gradients"}, {"synchronize": "updates", "overlap": True}):
        with pytest.raises(ValueError, match=r'islands need synchronize="updates", and cannot be combined with over'):
            wrap(model, DENSE, comm, islands=comm, **options)


def test_a_communicator_with_spares_is_refused(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    with islands_of(comm) as island:
        monkeypatch.setattr(comm, "recovery", SimpleNamespace(newcomers=SimpleNamespace(), count=0))
        with pytest.raises(ValueError, match="islands take no newcomers: leave out islands, or make the communicator"):
            wrapped(make_model(), comm, island)
        monkeypatch.undo()


@pytest.mark.mpi(min_size=2)
def test_parts_in_another_order_and_missing_islands_are_refused_on_all_ranks(comm: Communicator) -> None:
    turned = comm.split(0, key=-comm.rank)
    assert turned is not None
    with turned, pytest.raises(ValueError, match=r"rank 0 is number \d of the \d ranks of its part, and number 0"):
        wrapped(make_model(), comm, turned)
    with pytest.raises(CollectiveMismatch, match="islands="):
        wrapped(make_model(), comm, None if comm.rank else comm)


def test_a_sparse_gradient_is_refused_within_an_island(comm: Communicator) -> None:
    embedding = nn.Embedding(7, 3, sparse=True)
    inner = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1)
    optimizer = DistributedOptimizer(inner, DENSE, comm, synchronize="updates", islands=comm)
    embedding(torch.tensor([1, 2])).sum().backward()
    if comm.size > 1:
        with pytest.raises(ValueError, match="is sparse, which islands do not average"):
            optimizer.step()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("plan", [{"local_steps": 3}, {"local_steps": 4, "delay": 1}], ids=str)
def test_a_rank_that_cannot_make_a_step_is_named_by_all_and_its_island_does_not_wait(
    plan: dict[str, int], comm: Communicator
) -> None:
    model = make_model()
    with islands_of(comm) as island:
        optimizer = wrapped(model, comm, island, **plan)
        train(model, optimizer, comm, range(4))
        odd = comm.rank == comm.size - 1
        if odd:
            optimizer.optimizer.param_groups[0]["params"].pop()
        with pytest.raises(ValueError if odd else CollectiveMismatch, match=r"no longer holds parameter '2.bias'"):
            train(model, optimizer, comm, range(4, 10))
        assert same_on_all_ranks(model, comm)


def test_the_mean_goes_to_other_parameters_of_equal_values(comm: Communicator) -> None:
    whole = Islands(NodeLayout.of_keys([0] * comm.size, comm.rank), comm.members)
    averages = IslandGradients(comm, whole, 1.0)
    for _ in range(2):
        one = NamedParameter("one", nn.Parameter(torch.zeros(1)))
        one.parameter.grad = torch.tensor([1.0 + comm.rank])
        averages.average([one])
        assert one.parameter.grad.item() == (comm.size + 1) / 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bucket_mb", [25, 0.001], ids=["a longer bucket", "one bucket more"])
def test_a_parameter_that_one_rank_of_an_island_trains_is_named_by_all(bucket_mb: float, comm: Communicator) -> None:
    model = make_model()
    model.get_parameter("0.weight").requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(
        sgd, DENSE, comm, model.named_parameters(), "updates", local_steps=3, bucket_mb=bucket_mb, islands=comm
    )
    train(model, optimizer, comm, range(1))
    model.get_parameter("0.weight").requires_grad_(comm.rank == 0)
    with pytest.raises(CollectiveMismatch, match=r"of 4 parameters, the last of them '0.weight'"):
        train(model, optimizer, comm, range(1, 2))


@pytest.mark.parametrize("failing", ["one", "all"])
@pytest.mark.parametrize(
    ("with_islands", "plan"),
    [(True, {"local_steps": 3}), (True, {"local_steps": 4, "delay": 1}), (False, {"local_steps": 4, "delay": 1})],
)
def test_a_step_that_fails_and_is_repeated_leaves_nothing_behind(
    with_islands: bool, plan: dict[str, int], failing: str, comm: Communicator
) -> None:
    def fail() -> float:
        raise ValueError("no batch")

    def make_gradients(model: nn.Module, step: int) -> float:
        inputs, labels = batch(1000 * comm.rank + step)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss.item()

    models = [make_model(), make_model()]
    with islands_of(comm) as island:
        for model in models:
            optimizer = wrapped(model, comm, island if with_islands else None, **plan)
            for step in range(9):
                if model is models[1] and step == 2 and (failing == "all" or comm.rank == 0):
                    with pytest.raises(ValueError, match="no batch"):
                        optimizer.step(fail)
                optimizer.step(partial(make_gradients, model, step))
    assert torch.equal(*map(parameters_of, models))


@pytest.mark.mpi(min_size=2)
@pytest.mark.communicator(parting=True)
@pytest.mark.parametrize("at", [1, 2], ids=["before a synchronization", "in one"])
def test_a_step_that_fails_behind_the_means_of_its_island_ends_all_ranks(at: int, comm: Communicator) -> None:
    """The island has counted the step: its ranks would wait for each other in different calls."""
    model = make_model()
    with islands_of(comm) as island:
        optimizer = wrapped(model, comm, island, local_steps=3)
        train(model, optimizer, comm, range(at))

        def fail(*_: object) -> None:
            raise MemoryError("no room for the state")

        if comm.rank == 0:
            optimizer.optimizer.register_step_pre_hook(fail)
        with pytest.raises(MemoryError if comm.rank == 0 else CollectiveError, match="no room for the state"):
            train(model, optimizer, comm, range(at, 9))


@pytest.mark.mpi(min_size=2)
def test_a_model_is_freed_once_it_and_its_optimizer_are_dropped(comm: Communicator) -> None:
    model = make_model()
    with islands_of(comm) as island:
        optimizer = wrapped(model, comm, island, local_steps=2)
        train(model, optimizer, comm, range(3))
        parameter = weakref.ref(model[0].weight)
        del model, optimizer
        gc.collect()
        assert parameter() is None
