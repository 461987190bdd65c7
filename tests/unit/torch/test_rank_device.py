"""The device of a rank: the GPU with its number on the node, or one line on all ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collectives import Communicator
from collectives.threads.run_local import run_local
from mpicomp.torch import local_device


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let each thread be a rank with GPUs of its own numbering: `gpus[rank]` are the texts that no other GPU has."""
    here = threading.local()
    ranks = SimpleNamespace(gpus=[], taken={}, here=here)

    def mine() -> list[str]:
        found: list[str] = ranks.gpus[here.rank]
        return found

    def set_device(index: int) -> None:
        if mine()[index] == "busy":
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nor unavailable")
        ranks.taken[here.rank] = index

    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(mine()))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(mine()))
    monkeypatch.setattr("torch.cuda.set_device", set_device)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid=mine()[index]))
    return ranks


def found(ranks: Any, gpus: list[list[str]]) -> list[str]:
    """Return each rank's device, or the error that it raises."""
    ranks.gpus = gpus

    def device(comm: Communicator) -> str:
        ranks.here.rank = comm.rank
        try:
            return str(local_device(comm))
        except ValueError as error:
            return str(error).partition(", ")[2]

    return run_local(len(gpus), device)


def test_a_rank_takes_the_gpu_with_its_number(chosen: Any) -> None:
    assert found(chosen, [["a", "b"], ["a", "b"]]) == ["cuda:0", "cuda:1"]
    assert chosen.taken == {0: 0, 1: 1}


def test_a_rank_takes_the_only_gpu_that_it_finds(chosen: Any) -> None:
    assert found(chosen, [["a"], ["b"]]) == ["cuda:0", "cuda:0"]


def test_gpus_whose_identity_is_not_known_are_taken(chosen: Any) -> None:
    assert found(chosen, [["", ""], ["", ""]]) == ["cuda:0", "cuda:1"]


def test_without_any_gpu_the_cpu_is_the_device(chosen: Any) -> None:
    assert found(chosen, [[], []]) == ["cpu", "cpu"]
    assert chosen.taken == {}


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        ([["a"], []], "no GPU is found on rank 1, and other ranks find some, such as cuda:0: models train on one"),
        (
            [["a"], ["a"]],
            "ranks 0 and 1 have the same GPU, cuda:0: start a rank for each GPU, as mpicomp run --gpus does",
        ),
        ([["a", "b"]] * 3, "rank 2 has no GPU of its own, number 2 is not among the 2 that it finds: start a rank for"),
        ([["a", "b"], ["a", "busy"]], "rank 1 has no GPU of its own, cuda:1 cannot be used (CUDA error: all"),
    ],
    ids=["none", "shared", "too few", "busy"],
)
def test_a_rank_without_a_gpu_of_its_own_is_one_line_on_all_ranks(
    gpus: list[list[str]], text: str, chosen: Any
) -> None:
    lines = found(chosen, gpus)
    assert len({*lines}) == 1
    assert lines[0].startswith(f"local_device: {text}")
    assert "\n" not in lines[0]


def test_the_device_is_pytorchs(chosen: Any) -> None:
    chosen.gpus = [[]]
    chosen.here.rank = 0
    (device,) = run_local(1, lambda comm: (setattr(chosen.here, "rank", 0), local_device(comm))[1])
    assert device == torch.device("cpu")
