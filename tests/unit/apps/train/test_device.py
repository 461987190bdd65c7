"""Training on a device: as on the CPU, or one clear error where there is none."""

from __future__ import annotations

import copy

import pytest
import torch

from apps.train.checkpoint import _contiguous
from apps.train.data import load
from apps.train.options import parse
from apps.train.training import Training, device_of
from collectives import Communicator
from collectives.nodes.layout import NodeLayout
from mpicomp import Marsit
from tests.fake_torch import NAME, reachable

ARGV = ("--hidden", "8", "--epochs", "1", "--batch", "64", "--device", "cpu")


def trained(comm: Communicator, where: str) -> Training:
    """Two steps, then a new run that goes on from the state of this one."""
    first, second = (Training(parse(ARGV), comm, load("digits"), Marsit(3), where) for _ in range(2))
    first.train_epoch(lambda: first.step == 2)
    state = copy.deepcopy({**first.state_dict(), "buffers": {}})
    for part in second.restoring(first.model.state_dict(), state):
        part()
    second.train_epoch(lambda: second.step == 4)
    return second


def test_a_run_on_a_device_ends_as_on_the_cpu(comm: Communicator) -> None:
    expected = trained(comm, "cpu")
    with reachable():
        found = trained(comm, NAME)
        assert next(found.model.parameters()).device.type == NAME
        assert found.evaluate(load("digits").to(NAME).test) == expected.evaluate(load("digits").test)
        assert found._digest() == expected._digest()


def test_a_checkpoint_has_tensors_of_the_host() -> None:
    with reachable():
        assert _contiguous(torch.ones(2, device=NAME)).device.type == "cpu"


def test_a_rank_without_a_gpu_is_told_what_to_do(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^--device cuda, but PyTorch finds no GPU: .* or take --device"):
        device_of("cuda", comm)


def test_the_gpus_of_a_node_are_dealt_to_its_ranks(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for rank, index in enumerate((0, 1, 0)):
        monkeypatch.setattr(comm, "hosts", NodeLayout((0, 0, 0), rank))
        assert device_of("cuda", comm) == torch.device("cuda", index)
