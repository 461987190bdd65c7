"""Collectives and messages of tensors on a device: as of tensors on the CPU, also where ranks have different ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives import CollectiveMismatch, Communicator
from mpicomp import Dense, Marsit
from mpicomp.torch import ddp_hook
from mpicomp.torch.ddp import gradient_vectors
from mpicomp.torch.devices import devices_of
from mpicomp.torch.process_group import mpi_process_group, work
from mpicomp.torch.process_group.tensor_memory import PackedTensors, StagingTensors
from tests.fake_torch import NAME, FakeTorchDevice, gpu, reachable
from tests.mpi.torch.training import batch, make_model, parameters_of

pytestmark = [pytest.mark.mpi(max_size=3), pytest.mark.usefixtures("group"), pytest.mark.gpu]


@pytest.fixture
def device(told: list[Any]) -> Iterator[FakeTorchDevice]:
    """Make the fake device available, also where there is a GPU."""
    with reachable() as one:
        yield one


@pytest.fixture
def where(told: list[Any]) -> Iterator[str]:
    """Give the name of a GPU if there is one, and else of the fake device."""
    with gpu() as name:
        yield name


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give the devices of futures; without devices futures take no streams, which the fake device does not have."""
    found: list[Any] = []
    monkeypatch.setattr(mpi_process_group, "DEVICES", ["cpu", "cuda", NAME])
    if torch.cuda.is_available():
        return found
    for module in (work, gradient_vectors):
        monkeypatch.setattr(module, "devices_of", lambda tensors: found.extend(devices_of(tensors)) or [])
    return found


def mine(where: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float64) + 100 * dist.get_rank()).to(dtype).view(shape).to(where)


def of_all(where: str, n: int) -> list[Tensor]:
    return [torch.zeros(n, device=where) for _ in range(dist.get_world_size())]


def all_reduce(where: str) -> list[Tensor]:
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.complex64):
        tensor = mine(where, 3, 5, dtype=dtype)
        dist.all_reduce(tensor)
        found.append(tensor)
    return found


def of_a_transposed_tensor(where: str) -> list[Tensor]:
    tensor = mine(where, 3, 5)
    dist.all_reduce(tensor.t(), dist.ReduceOp.MAX)
    return [tensor]


def of_no_elements(where: str) -> list[Tensor]:
    tensor = mine(where, 0)
    dist.all_reduce(tensor)
    return [tensor]


def reduce(where: str) -> list[Tensor]:
    tensor = mine(where, 7)
    dist.reduce(tensor, 0, dist.ReduceOp.AVG)
    return [tensor]


def broadcast(where: str) -> list[Tensor]:
    tensor = mine(where, 7, dtype=torch.bool)
    dist.broadcast(tensor, dist.get_world_size() - 1)
    return [tensor]


def all_gather(where: str) -> list[Tensor]:
    outputs, x = of_all(where, 4), mine(where, 4)
    dist.all_gather(outputs, x)
    return [*outputs, x]


def all_gather_single(where: str) -> list[Tensor]:
    output = torch.zeros(4 * dist.get_world_size(), device=where)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # PyTorch 2.13 has the new name
    gather(output, mine(where, 4))
    return [output]


def reduce_scatter(where: str) -> list[Tensor]:
    output = torch.zeros(4, device=where)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    scatter(output, mine(where, 4 * dist.get_world_size()))
    return [output]


def all_to_all(where: str) -> list[Tensor]:
    outputs = of_all(where, 2)
    dist.all_to_all(outputs, [mine(where, 2) + peer for peer in range(dist.get_world_size())])
    return outputs


def all_to_all_single(where: str) -> list[Tensor]:
    size = dist.get_world_size()
    output = torch.zeros(size, 3, device=where)
    dist.all_to_all_single(output, mine(where, size, 3), [1] * size, [1] * size)
    return [output]


def gather_and_scatter(where: str) -> list[Tensor]:
    root = dist.get_rank() == 0
    outputs, x = of_all(where, 3) if root else None, mine(where, 3)
    dist.gather(x, outputs)
    dist.scatter(x, outputs)
    return [*(outputs or []), x]


def messages(where: str) -> list[Tensor]:
    """Two of one tag, and the second could go at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    there, here = torch.zeros(5, device=where), torch.zeros(3)
    to, source = (rank + 1) % size, (rank - 1) % size
    in_flight = [
        dist.isend(mine(where, 5), to),
        dist.isend(mine("cpu", 3), to),
        dist.irecv(there, source),
        dist.irecv(here, source),
    ]
    for one in in_flight:
        one.wait()
    return [there, here]


CALLS: list[Callable[[str], list[Tensor]]] = [
    all_reduce,
    of_a_transposed_tensor,
    of_no_elements,
    reduce,
    broadcast,
    all_gather,
    all_gather_single,
    reduce_scatter,
    all_to_all,
    all_to_all_single,
    gather_and_scatter,
    messages,
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_call_gives_what_it_gives_on_the_cpu(
    call: Callable[[str], list[Tensor]], everywhere: bool, where: str
) -> None:
    where = where if everywhere or dist.get_rank() == 0 else "cpu"
    for one, expected in zip(call(where), call("cpu"), strict=True):
        assert one.device.type in (where, "cpu")
        assert torch.equal(one.cpu(), expected)


def test_a_call_in_flight_leaves_the_result_when_its_future_is_done(told: list[Any], device: FakeTorchDevice) -> None:
    tensor = mine(NAME, 7)
    in_flight = dist.all_reduce(tensor, async_op=True)
    read = in_flight.get_future().then(lambda future: future.value()[0].cpu().clone())
    expected = sum(torch.arange(7.0) + 100 * rank for rank in range(dist.get_world_size()))
    assert torch.equal(read.wait(), expected)
    assert in_flight.result()[0] is tensor
    assert told == [tensor.device]


def test_an_input_is_left_alone_by_a_gather_and_by_a_reduction_to_another_rank(device: FakeTorchDevice) -> None:
    x = mine(NAME, 3)
    dist.reduce(x, 0)
    if dist.get_rank():
        assert len(device.copied) == 1  # to the host


@pytest.mark.parametrize("transposed", [False, True])
def test_a_broadcast_crosses_once_on_each_rank(transposed: bool, device: FakeTorchDevice) -> None:
    """The root's tensor to its host, and from there to the others' devices, whose own values nobody reads."""
    x, root = mine(NAME, 3, 5), dist.get_world_size() - 1
    dist.broadcast(x.t() if transposed else x, root)
    assert device.copied == [60]
    assert torch.equal(x.cpu(), torch.arange(15.0).view(3, 5) + 100 * root)


@pytest.mark.usefixtures("device")
def test_host_copies_of_a_list_are_adjacent_and_sent_from_there() -> None:
    tensors = [mine(NAME, 2, 3), mine(NAME, 0), mine(NAME, 4)]
    packed = PackedTensors(StagingTensors().stage(tensors, read=True, written=True))
    packed.flat.fill_(3)
    assert not packed.is_copy
    assert packed.nbytes == 40


@pytest.mark.mpi(min_size=2, max_size=3)
def test_no_pinned_memory_is_told_to_all_ranks_and_the_next_call_goes_well(device: FakeTorchDevice) -> None:
    device.has_memory = dist.get_rank() != 0
    error = CollectiveMismatch if device.has_memory else MemoryError
    with pytest.raises(error, match="20 bytes of fake:0 cannot be taken through pinned memory"):
        dist.all_reduce(mine(NAME, 5))
    device.has_memory = True
    dist.all_reduce(mine(NAME, 5))


def trained(comm: Communicator, where: str, algorithm: Any) -> Tensor:
    """A model under DDP, whose gradients the backend averages, or the hook by an algorithm."""
    model = DistributedDataParallel(make_model().to(where))
    if algorithm is not None:
        state, hook = ddp_hook(algorithm, comm, model)
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(4):
        inputs, labels = batch(1000 * comm.rank + number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.to(where)), labels.to(where)).backward()
        optimizer.step()
    return parameters_of(model).cpu()


@pytest.mark.parametrize("algorithm", [Dense(), Marsit(None)])
def test_ddp_has_the_same_model_on_all_ranks(comm: Communicator, algorithm: Any, where: str) -> None:
    model = trained(comm, where, algorithm)
    assert torch.equal(torch.as_tensor(comm.broadcast(model.clone())), model)


@pytest.mark.parametrize("algorithm", [None, Dense(), Marsit(None)])
@pytest.mark.usefixtures("device")
def test_a_model_under_ddp_is_trained_to_the_same_bits(comm: Communicator, algorithm: Any) -> None:
    assert torch.equal(trained(comm, NAME, algorithm), trained(comm, "cpu", algorithm))
