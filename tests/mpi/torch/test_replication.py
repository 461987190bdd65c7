"""Models made equal, and errors for models that are not."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp import Dense
from mpicomp.torch import average_buffers, broadcast_parameters, require_same
from tests.mpi.lanes import same_text_on
from tests.mpi.torch.training import make_model, on_all_ranks, parameters_of, train, wrap


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_copies_parameters_and_buffers_of_any_dtype(comm: Communicator, root: int) -> None:
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, dtype=torch.bfloat16))
    model[1].num_batches_tracked.fill_(comm.rank)
    model[1].running_mean.copy_(torch.randn(5))
    broadcast_parameters(model, comm, root)
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    vectors = on_all_ranks(torch.cat([tensor.flatten() for tensor in state.values()]), comm)
    assert all(torch.equal(vector, vectors[0]) for vector in vectors)
    assert state["1.num_batches_tracked"] == root


@pytest.mark.mpi(min_size=2)
def test_broadcast_copies_buffers_that_are_not_in_the_state_and_leaves_other_state_alone(comm: Communicator) -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("directions", torch.full((2, 3), float(comm.rank)), persistent=False)
            self.register_buffer("nothing", None)
            self.weight = self.tied = nn.Parameter(torch.full((3,), float(comm.rank)))

        def get_extra_state(self) -> dict[str, int]:
            return {"rank": comm.rank}

        def set_extra_state(self, state: dict[str, int]) -> None:
            raise AssertionError("nothing is loaded")

    model = Features()
    broadcast_parameters(model, comm, root=1)
    assert torch.equal(model.directions, torch.ones(2, 3))
    assert model.tied is model.weight
    assert torch.equal(model.weight.detach(), torch.ones(3))


@pytest.mark.mpi(min_size=2)
def test_broadcast_takes_a_state_dict_and_any_strides(comm: Communicator) -> None:
    tensor = torch.full((3, 2), float(comm.rank)).t()
    nothing, alone = torch.zeros(4, 0).t(), torch.full((7,), float(comm.rank))[::7]
    named = {"a": tensor, "nothing": nothing, "alone": alone, "flag": torch.tensor(True)}
    broadcast_parameters(named, comm, root=1)
    assert torch.equal(tensor, torch.ones(2, 3))
    assert alone.tolist() == [1]


@pytest.mark.mpi(min_size=2)
def test_broadcast_between_different_models_is_refused_on_every_rank(comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatch, match=r"rank 0: 2 tensors of 8 elements"):
        broadcast_parameters(nn.Linear(3, 2) if comm.rank == 0 else nn.Linear(2, 2), comm)


SIZES = {"first": torch.zeros(3), "second": torch.zeros(2, 4), "third": torch.zeros(4)}
OTHERS = {
    "shape": (SIZES | {"second": torch.zeros(4, 2)}, r"number 1 is second \(4, 2\) torch.float32"),
    "dtype": (SIZES | {"second": torch.zeros(2, 4).half()}, r"number 1 is second \(2, 4\) torch.float16"),
    "name": ({"first": torch.zeros(3), "2nd": torch.zeros(2, 4)}, r"number 1 is 2nd \(2, 4\) torch.float32"),
    "one less": ({"first": torch.zeros(3)}, "1 tensors of 3 elements, and no other"),
    "order": (dict(reversed(SIZES.items())), r"number 0 is third \(4,\) torch.float32"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", OTHERS)
def test_the_first_tensor_that_differs_is_named(comm: Communicator, other: str) -> None:
    odd, (tensors, told) = comm.size - 1, OTHERS[other]
    named = "first" if other == "order" else "second"
    with pytest.raises(CollectiveMismatch) as caught:
        broadcast_parameters(tensors if comm.rank == odd else SIZES, comm)
    text = same_text_on(comm, caught.value, range(comm.size))
    theirs = rf"rank[^;]*: 3 tensors of 15 elements, of which number . is {named} \([^;]*"
    assert re.search(rf"a comparison of tensors: {theirs}; rank {odd}: [^;]*{told}\. Make", text), text


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "'a' is a int"),
        (torch.zeros(2, device="meta"), r"'a' lives on meta, .* a shape and no values\); .*module.to_empty"),
        (torch.zeros(1).expand(2), r"'a' is expanded, .*; pass tensor\.contiguous"),
    ],
    ids=["type", "device", "expanded"],
)
def test_what_one_rank_cannot_broadcast_is_told_on_every_rank(comm: Communicator, entry: object, message: str) -> None:
    mine = entry if comm.rank == 1 else torch.zeros(2)
    expected = (TypeError, ValueError) if comm.rank == 1 else CollectiveMismatch
    with pytest.raises(expected, match=rf"rank 1 of {comm.size}, broadcast_parameters: .*{message}"):
        broadcast_parameters({"a": mine}, comm)
    comm.barrier()


def test_average_buffers_averages_floats_and_leaves_counts(comm: Communicator) -> None:
    norm = nn.BatchNorm1d(4)
    norm.running_mean.fill_(comm.rank)
    norm.running_var.fill_(2 * comm.rank)
    norm.num_batches_tracked.fill_(comm.rank)
    average_buffers(norm, comm)
    torch.testing.assert_close(norm.running_mean, torch.full((4,), (comm.size - 1) / 2))
    torch.testing.assert_close(norm.running_var, torch.full((4,), float(comm.size - 1)))
    assert norm.num_batches_tracked == comm.rank


class Spectrum(nn.Module):
    """Buffers whose memory does not hold their values."""

    def __init__(self, value: float) -> None:
        super().__init__()
        numbers = torch.full((3,), complex(value, 2 * value))
        self.register_buffer("plain", numbers.clone())
        self.register_buffer("wide", numbers.to(torch.complex128))
        self.register_buffer("conjugated", numbers.clone().conj())
        self.register_buffer("imaginary", numbers.clone().conj().imag)
        self.register_buffer("negated", torch._neg_view(torch.full((2, 2), value)))
        self.register_buffer("count", torch.tensor(int(value)))

    def expected(self, value: float) -> dict[str, torch.Tensor]:
        """Return the values of the buffers, in plain memory."""
        numbers = torch.full((3,), complex(value, 2 * value))
        conjugated = torch.full((3,), complex(value, -2 * value))
        negated, imaginary = torch.full((2, 2), -value), torch.full((3,), -2 * value)
        return {
            "plain": numbers,
            "wide": numbers.to(torch.complex128),
            "conjugated": conjugated,
            "imaginary": imaginary,
            "negated": negated,
        }


def test_buffers_that_are_complex_conjugated_or_negated_are_averaged(comm: Communicator) -> None:
    model = Spectrum(float(comm.rank))
    average_buffers(model, comm)
    for name, want in model.expected((comm.size - 1) / 2).items():
        torch.testing.assert_close(getattr(model, name).resolve_conj().resolve_neg(), want)
    assert model.count == comm.rank


def test_complex_buffers_behind_an_odd_number_of_floats_are_averaged(comm: Communicator) -> None:
    model = nn.Module()
    model.register_buffer("floats", torch.full((3,), float(comm.rank)))
    model.register_buffer("complex", torch.full((2,), 1j * comm.rank))
    average_buffers(model, comm)
    assert model.complex.tolist() == [0.5j * (comm.size - 1)] * 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("root", [0, 1])
def test_tensors_that_are_complex_conjugated_or_negated_are_broadcast(comm: Communicator, root: int) -> None:
    model = Spectrum(comm.rank + 1.0)
    broadcast_parameters(model, comm, root)
    for name, want in model.expected(root + 1.0).items():
        torch.testing.assert_close(getattr(model, name).resolve_conj().resolve_neg(), want)
    mine = torch.arange(3.0) if comm.rank == root else torch._neg_view(torch.zeros(3))
    broadcast_parameters({"negated on others": mine}, comm, root)
    assert torch.equal(mine.resolve_neg(), torch.arange(3.0))


@pytest.mark.mpi(min_size=2)
def test_a_buffer_without_values_on_one_rank_is_told_on_every_rank(comm: Communicator) -> None:
    model = nn.BatchNorm1d(4, device="meta" if comm.rank == 1 else "cpu")
    with pytest.raises(ValueError if comm.rank == 1 else CollectiveMismatch, match=r"average_buffers.*running_mean"):
        average_buffers(model, comm)


@pytest.mark.mpi(min_size=2)
def test_a_forgotten_broadcast_is_told_at_the_first_step(comm: Communicator) -> None:
    model = make_model(seed=comm.rank)
    optimizer = wrap(model, Dense(), comm)
    with pytest.raises(CollectiveMismatch, match=r"broadcast_parameters\(model, comm\)"):
        train(model, optimizer, comm, range(1))
    broadcast_parameters(model, comm)
    train(model, optimizer, comm, range(1))
    assert torch.equal(*on_all_ranks(parameters_of(model), comm)[:2])


@pytest.mark.mpi(min_size=2)
def test_wrapping_different_models_is_refused_on_every_rank(comm: Communicator) -> None:
    model = nn.Linear(3, 2) if comm.rank else nn.Linear(2, 3)
    with pytest.raises(CollectiveMismatch, match="ranks differ"):
        wrap(model, Dense(), comm)


class Experts(nn.Module):
    """A layer that all ranks share, and experts of this rank, of which each rank has another number."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(1 + rank))
        for number in self.parameters():
            nn.init.constant_(number, rank)
        for one in self.experts:
            one[1].running_mean.fill_(rank)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("exclude", ["experts.*", ["experts.*"], ("*.bias", "experts.*")], ids=str)
def test_tensors_that_are_left_out_stay_the_ranks_own(exclude: object, comm: Communicator) -> None:
    model = Experts(comm.rank)
    broadcast_parameters(model, comm, root=1, exclude=exclude)
    require_same(model, comm, exclude=exclude)
    average_buffers(model, comm, exclude="experts.*")
    assert (model.gate.weight == 1).all()
    assert (model.gate.bias == (comm.rank if "*.bias" in exclude else 1)).all()
    assert all((one[0].weight == comm.rank).all() and (one[1].running_mean == comm.rank).all() for one in model.experts)
    with pytest.raises(CollectiveMismatch):
        require_same(model, comm)


@pytest.mark.mpi(min_size=2)
def test_an_optimizer_compares_its_own_parameters_alone(comm: Communicator) -> None:
    model = Experts(comm.rank)
    broadcast_parameters(model, comm, exclude="experts.*")
    optimizer = wrap(model.gate, Dense(), comm)
    for _ in range(3):
        optimizer.zero_grad()
        model.gate(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    require_same(model.gate, comm)
    assert (model.experts[0][0].weight == comm.rank).all()


@pytest.mark.mpi(min_size=2)
def test_a_misspelt_name_to_leave_out_is_refused_before_anything_is_overwritten(comm: Communicator) -> None:
    model = Experts(comm.rank)
    with pytest.raises(
        ValueError, match=r"exclude has 'expert\.\*', which fits no name; pass names such as gate\.weight"
    ):
        broadcast_parameters(model, comm, exclude="expert.*")
    assert (model.gate.weight == comm.rank).all()
