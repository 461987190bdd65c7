"""The hook for FSDP2: its gradients, and their accumulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from mpicomp import (
    QSGD,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    LocalTopK,
    MajorityVote,
    Marsit,
    PowerSGD,
    Relay,
    ScaleCom,
)
from mpicomp.aggregator.base import Aggregator
from mpicomp.torch import FSDPHook, fsdp_hook
from tests.mpi.torch.fsdp.sharded_models import Cluster, Transformer, loss_of, parameters_of, sgd, shard, train

pytestmark = pytest.mark.mpi(min_size=4, max_size=4)
STEPS = range(4)
FORMS: dict[str, Any] = {
    "dense": Dense(),
    "marsit": Marsit(3),
    "marsit, two winners": Marsit(winners=2),
    "majority vote": MajorityVote(),
    "ef-signsgd": EFSignSGD(),
    "scalecom": ScaleCom(rate=8),
    "local top-k": LocalTopK(rate=8),
    "qsgd": QSGD(),
    "double squeeze": DoubleSqueeze(),
    "relay": Relay(16),
    "relay, levels of gradients": Relay(),
    "power-sgd": PowerSGD(1, start_step=1),
}


class ByHand:
    """The rule of the hook on a model that is not sharded: node means, then the method between equal shards."""

    def __init__(self, hook: FSDPHook, algorithm: Any, nodes: Cluster) -> None:
        self._nodes, self._alignment = nodes, 64 if algorithm.uses_tensor_lengths else 1
        self.model = Transformer()
        self.optimizer = sgd(self.model)
        self._groups = hook.buckets
        self._aggregators = [self._start(algorithm, names, index) for index, names in enumerate(self._groups)]

    def _own(self, tensor: Tensor) -> Tensor:
        local = self._nodes.nodes.local
        rows = -(-len(tensor) // local.size)
        return tensor[local.rank * rows : (local.rank + 1) * rows]

    def _padded(self, tensor: Tensor) -> int:
        return -(-tensor.numel() // self._alignment) * self._alignment

    def _start(self, algorithm: Any, names: list[str], index: int) -> Aggregator:
        shapes = [self._own(self.model.get_parameter(name)) for name in names]
        n, local = sum(map(self._padded, shapes)), self._nodes.nodes.local
        with_shapes = {"tensor_shapes": [tuple(one.shape) for one in shapes]} if self._alignment > 1 else {}
        number = index * local.size + local.rank
        made: Aggregator = algorithm.of_gradients().start(self._nodes.across, n, vector_id=number, **with_shapes)
        return made

    def train(self, steps: range) -> None:
        local = self._nodes.nodes.local
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, self._nodes.world.rank, step).backward()
            for names, aggregator in zip(self._groups, self._aggregators, strict=True):
                vector, places, at = np.zeros(aggregator.n, np.float32), [], 0
                for name in names:
                    gradient = self.model.get_parameter(name).grad
                    assert gradient is not None
                    mean = local.allreduce(gradient.numpy(), op="mean")
                    own = self._own(torch.from_numpy(mean))
                    vector[at : at + own.numel()] = own.numpy().ravel()
                    places.append((name, at, own.shape))
                    at += self._padded(own)
                result = aggregator.aggregate(vector)
                for name, start, shape in places:
                    part = torch.from_numpy(result[start : start + shape.numel()].copy()).view(shape)
                    gradient = self.model.get_parameter(name).grad
                    assert gradient is not None
                    gradient.copy_(torch.cat(local.allgather_object(part)))
            self.optimizer.step()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_the_methods_mean_of_node_means_bit_for_bit(form: str, nodes: Cluster) -> None:
    model = shard(Transformer(), nodes.shards)
    hook = fsdp_hook(FORMS[form], nodes.across, model)
    by_hand = ByHand(hook, FORMS[form], nodes)
    train(model, sgd(model), STEPS)
    by_hand.train(STEPS)
    assert torch.equal(parameters_of(model), parameters_of(by_hand.model))
    assert {aggregator.step for aggregator in hook.aggregators} == {len(STEPS)}


def test_parameters_of_a_group_with_different_algorithms_have_vectors_of_their_own(nodes: Cluster) -> None:
    model = shard(Transformer(), nodes.shards)
    hook = fsdp_hook({"*bias": Dense(), "*": EFSignSGD()}, nodes.across, model)
    train(model, sgd(model), STEPS)
    kinds = [(type(one.algorithm), all(name.endswith("bias") for name in names)) for one, names in vectors(hook)]
    assert sorted(kinds, key=str) == [(Dense, True)] * 3 + [(EFSignSGD, False)] * 3


def test_the_hook_is_watched(nodes: Cluster) -> None:
    model, unwatched = (shard(Transformer(), nodes.shards) for _ in range(2))
    hook = fsdp_hook(DoubleSqueeze(), nodes.across, model)
    optimizer = sgd(model)
    for step in STEPS:
        train(model, optimizer, range(step, step + 1))
        found = hook.diagnostics(every=1, audit_every=1)
    assert found.audits == len(STEPS) - 1
    assert found.cosine > 0.1
    assert found.residual_norm > 0
    assert len({*nodes.across.allgather_object((found.update_norm, found.cosine))}) == 1
    fsdp_hook(DoubleSqueeze(), nodes.across, unwatched)
    train(unwatched, sgd(unwatched), STEPS)
    assert torch.equal(parameters_of(model), parameters_of(unwatched))


def vectors(hook: FSDPHook) -> list[tuple[Aggregator, list[str]]]:
    return list(zip(hook.aggregators, hook.buckets, strict=True))


def gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad.to_local().clone() for one in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("option", ["no all-reduce", "no synchronization", "every backward"])
def test_accumulated_gradients_are_those_of_native_hsdp(option: str, nodes: Cluster) -> None:
    native, model = shard(Transformer(), nodes.mesh), shard(Transformer(), nodes.shards)
    fsdp_hook(Dense(), nodes.across, model)
    rank = nodes.world.rank
    for one in native, model:
        for micro in range(3):
            is_last = micro == 2
            if option == "no all-reduce":
                one.set_requires_all_reduce(is_last)  # type: ignore[operator]
            elif option == "no synchronization":
                one.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            loss_of(one, rank, micro).backward()
    torch.testing.assert_close(gradients(model), gradients(native))


@pytest.mark.parametrize("option", ["set_requires_all_reduce", "set_requires_gradient_sync"])
def test_the_last_micro_batch_alone_is_sent_and_counts_as_a_step(option: str, nodes: Cluster) -> None:
    model = shard(Transformer(), nodes.shards)
    hook = fsdp_hook(EFSignSGD(), nodes.across, model)
    for micro in range(3):
        assert hook.traffic.total.messages == 0
        getattr(model, option)(micro == 2)
        loss_of(model, nodes.world.rank, micro).backward()
    assert {aggregator.step for aggregator in hook.aggregators} == {1}
    assert hook.traffic.total.messages > 0


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["whole", "mixed"])
def test_residuals_of_bfloat16_parameters_are_float32(policy: MixedPrecisionPolicy | None, nodes: Cluster) -> None:
    """A residual in bfloat16 would lose errors that are smaller than 2^-9 of itself."""
    model = Transformer() if policy else Transformer().to(torch.bfloat16)
    shard(model, nodes.shards, **({"mp_policy": policy} if policy else {}))
    hook = fsdp_hook(EFSignSGD(), nodes.across, model)
    train(model, sgd(model), STEPS)
    assert {one.dtype for one in model.parameters()} == {torch.float32 if policy else torch.bfloat16}
    residuals = [aggregator.residual for aggregator in hook.aggregators]
    assert all(isinstance(one, np.ndarray) and one.dtype == np.float32 for one in residuals)
    whole = np.concatenate([np.asarray(one) for one in residuals]).view(np.uint32)
    assert (whole & 0xFFFF).any()  # bits that bfloat16 lacks
    assert torch.equal(*nodes.across.allgather_object(parameters_of(model)))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is PyTorch 2.9's")
def test_muon_moves_sharded_matrices_as_one_process_moves_whole_ones(nodes: Cluster) -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([one for one in model.parameters() if one.dim() == 2], lr=0.02, momentum=0.9)

    model, alone = shard(Transformer(), nodes.shards), Transformer()
    fsdp_hook(Dense(), nodes.across, model)
    sharded, by_hand = muon(model), muon(alone)
    train(model, sharded, STEPS)
    for step in STEPS:
        by_hand.zero_grad()
        for rank in range(nodes.world.size):
            (loss_of(alone, rank, step) / nodes.world.size).backward()
        by_hand.step()
    start, end = parameters_of(Transformer()), parameters_of(alone)
    difference = (parameters_of(model) - end).norm() / (end - start).norm()
    assert difference < 0.2  # Muon computes in bfloat16; with halves that are made orthogonal alone it is 0.53
