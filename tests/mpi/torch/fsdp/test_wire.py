"""FSDP2's collectives with fewer bits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from collectives.errors import CollectiveMismatch
from mpicomp.codecs import Clipping, Draw, OneBit, Quantizer, Ternary
from mpicomp.kernels.streams import Stream
from mpicomp.torch import fsdp_wire
from mpicomp.torch.fsdp.parameter_groups import parameter_groups
from mpicomp.torch.fsdp.wire import QuantizedAllGather, RoundedAllGather, RoundedReduceScatter
from mpicomp.torch.process_group import registration
from tests.mpi.lanes import TIMEOUT_S, up_to_four_ranks
from tests.mpi.torch.fsdp.sharded_models import Transformer, loss_of, parameters_of, sgd, shard, train

pytestmark = up_to_four_ranks
WEIGHTS: dict[str, Any] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "quantizer": Quantizer(bucket=64, levels=127),
    "clipping": Clipping(bits=16),
}


@pytest.fixture(params=["mpicomp", "gloo"])
def mesh(request: pytest.FixtureRequest, mpi_comm: MPI.Intracomm) -> Iterator[DeviceMesh]:
    """Return a mesh of all ranks over either backend."""
    registration.register_backend()
    dist.init_process_group(request.param, init_method="mpicomp://", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        yield init_device_mesh("cpu", (mpi_comm.size,))
    finally:
        dist.destroy_process_group()


def of_all_ranks(tensor: Tensor) -> list[Tensor]:
    found: list[Tensor] = [tensor] * dist.get_world_size()
    dist.all_gather_object(found, tensor)
    return found


def test_rounded_weights_are_those_of_mixed_precision_computed_in_float32(mesh: DeviceMesh) -> None:
    model, plain = shard(Transformer(), mesh), Transformer()
    fsdp_wire(model, weights="bfloat16")
    with torch.no_grad():
        for one in plain.parameters():
            one.copy_(one.bfloat16())
    rank = dist.get_rank()
    loss = loss_of(model, rank, 0)
    if dist.get_world_size() > 1:  # FSDP gathers nothing on a single rank
        assert torch.equal(loss, loss_of(plain, rank, 0))
    loss.backward()
    assert all(one.dtype == torch.float32 for one in model.parameters())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_ranks_decode_the_same_weights(form: str, asynchronous: bool, dtype: torch.dtype, mesh: DeviceMesh) -> None:
    rank, size, n = dist.get_rank(), dist.get_world_size(), 1000
    values = torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(dtype)
    stream, choice = Stream(5, 2, "fsdp weights"), WEIGHTS[form]
    gather = RoundedAllGather(choice) if isinstance(choice, str) else QuantizedAllGather(choice, stream)
    found = gather.allocate((size * n,), dtype=dtype, device=torch.device("cpu"))
    own = found[rank * n : (rank + 1) * n].copy_(values)  # as FSDP's lies in the output
    work = gather(found, own, mesh.get_group(), asynchronous)
    if work is not None:
        work.wait()
    assert all(torch.equal(one, found) for one in of_all_ranks(found))
    for other, row in enumerate(found.view(size, n)):
        sent = torch.randn(n, generator=torch.Generator().manual_seed(other)).to(dtype)
        if isinstance(choice, str):
            short = dtype if dtype == torch.bfloat16 else getattr(torch, choice)
            expected = sent.to(short).to(dtype)
        else:
            payload, decoded = np.empty(choice.nbytes(n), np.uint8), np.empty(n, np.float32)
            choice.encode(sent.float().numpy(), payload, draw=Draw(stream, step=0, rank=other))
            choice.decode(payload, decoded, weight=1)
            expected = torch.from_numpy(decoded).to(dtype)
        assert torch.equal(row, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", ["sum", "avg", "factor"])
def test_rounded_gradients_are_added_in_float32_in_the_order_of_ranks(op: str, dtype: str, mesh: DeviceMesh) -> None:
    rank, size, n = dist.get_rank(), dist.get_world_size(), 500
    of_ranks = [torch.randn(size, n, generator=torch.Generator().manual_seed(one)) for one in range(size)]
    ops = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "factor": dist._make_nccl_premul_sum(0.25)}
    found = torch.empty(n)
    RoundedReduceScatter(dtype)(found, of_ranks[rank].flatten(), mesh.get_group(), ops[op])
    expected = torch.zeros(n)
    for one in of_ranks:
        expected += (one[rank] * (0.25 if op == "factor" else 1)).to(getattr(torch, dtype)).float()
    assert torch.equal(found, expected / size if op == "avg" else expected)


@pytest.mark.parametrize(
    ("mesh", "form"), [*(("mpicomp", form) for form in WEIGHTS), ("gloo", "quantizer")], indirect=["mesh"]
)
def test_training_is_close_to_that_in_full_precision(form: str, mesh: DeviceMesh) -> None:
    exact, model = shard(Transformer(), mesh), shard(Transformer(), mesh)
    fsdp_wire(model, weights=WEIGHTS[form], gradients="bfloat16", seed=1)
    for one in exact, model:
        train(one, sgd(one), range(5))
    torch.testing.assert_close(parameters_of(model), parameters_of(exact), rtol=0.05, atol=0.01)
    if dist.get_world_size() > 1:
        assert not torch.equal(parameters_of(model), parameters_of(exact))
    fsdp_wire(model)  # FSDP's own again
    with torch.no_grad():
        for one, other in zip(model.parameters(), exact.parameters(), strict=True):
            one.copy_(other)
    assert torch.equal(loss_of(model, 0, 9), loss_of(exact, 0, 9))


def test_weights_of_backward_are_those_of_forward(mesh: DeviceMesh) -> None:
    model = shard(Transformer(), mesh, reshard_after_forward=True)
    fsdp_wire(model, weights=Quantizer(bucket=64, levels=7))
    seen: list[Tensor] = []
    wide = model.blocks[0].wide  # type: ignore[index]
    wide.register_forward_hook(lambda *_: seen.append(wide.weight.detach().clone()))
    wide.register_full_backward_hook(lambda *_: seen.append(wide.weight.detach().clone()))
    loss_of(model, dist.get_rank(), 0).backward()
    assert torch.equal(*seen)


def test_frozen_modules_are_gathered_in_the_same_form(mesh: DeviceMesh) -> None:
    model = Transformer()
    model.blocks[0].requires_grad_(False)
    shard(model, mesh)
    fsdp_wire(model, weights="bfloat16")
    assert {type(one._group._all_gather_comm) for one in parameter_groups(model)} == {RoundedAllGather}
    train(model, sgd(model), range(1))


def test_mixed_precision_sends_its_own_type(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    native, model = (shard(Transformer(), mesh, mp_policy=policy) for _ in range(2))
    fsdp_wire(model, weights="bfloat16", gradients="bfloat16")
    for one in native, model:
        train(one, sgd(one), range(3))
    assert torch.equal(parameters_of(model), parameters_of(native))


@pytest.mark.mpi(min_size=2)
def test_weights_without_a_code_are_an_error_on_all_ranks(mesh: DeviceMesh) -> None:
    model = shard(Transformer(), mesh)
    fsdp_wire(model, weights=Quantizer())
    with torch.no_grad():
        if dist.get_rank() == 1:
            next(model.parameters()).to_local()[0] = float("nan")
    with pytest.raises(ValueError, match=r"the weights on rank 1 of the FSDP group contain NaN or infinity"):
        loss_of(model, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "float8"}, r"weights is 'float8'; choose \"bfloat16\", \"float16\", None, or a Quantizer"),
        ({"weights": OneBit()}, r"or a Quantizer or Clipping"),
        ({"weights": Ternary()}, r"or a Quantizer or Clipping"),
        ({"weights": Quantizer(coding="entropy")}, r"messages of different lengths; choose coding=\"fixed\""),
        ({"gradients": "float32"}, r"gradients is 'float32'; choose \"bfloat16\", \"float16\" or None"),
    ],
)
def test_options_out_of_range_are_errors_on_all_ranks(options: dict[str, Any], message: str, mesh: DeviceMesh) -> None:
    model = shard(Transformer(), mesh)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = options if rank == size - 1 else {}
    with pytest.raises(ValueError if mine else CollectiveMismatch, match=message):
        fsdp_wire(model, **mine)
    assert {type(one._group._all_gather_comm).__name__ for one in parameter_groups(model)} == {"DefaultAllGather"}


@pytest.mark.mpi(min_size=2)
def test_other_options_on_a_rank_are_an_error_on_all_ranks(mesh: DeviceMesh) -> None:
    with pytest.raises(CollectiveMismatch, match=r"ranks 0 and 1 differ in their arguments: .*seed=0 and .*seed=1"):
        fsdp_wire(shard(Transformer(), mesh), "bfloat16", seed=min(dist.get_rank(), 1))


def test_a_model_that_is_not_sharded_is_an_error(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"no module of the Linear is sharded .* call .*fully_shard on it first"):
        fsdp_wire(nn.Linear(2, 2), "bfloat16")
    with pytest.raises(TypeError, match=r"the model is a dict; pass the module"):
        fsdp_wire({}, "bfloat16")  # type: ignore[arg-type]
