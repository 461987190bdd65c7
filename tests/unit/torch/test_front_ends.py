"""First mistakes with DistributedOptimizer: one sentence with the cure."""

from __future__ import annotations

import rlcompleter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from mpicomp import Communicator, Dense
from mpicomp.torch import DistributedOptimizer, OneBitAdam, average_buffers, broadcast_parameters, ddp_hook

MODEL = nn.Linear(3, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
WRONG: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "name": (lambda c: DistributedOptimizer(SGD, "dense", c), r"pass an instance, mpicomp.algorithm\('dense'\)"),
    "misspelt": (lambda c: DistributedOptimizer(SGD, "Marsitt", c), r"mpicomp.algorithm\('marsit'\)"),
    "class": (lambda c: DistributedOptimizer(SGD, Dense, c), r"the algorithm is a class: write Dense\(\)"),
    "number": (lambda c: DistributedOptimizer(SGD, 3, c), "the algorithm is of type int: pass a method"),
    "Horovod's order": (
        lambda c: DistributedOptimizer(SGD, MODEL.named_parameters(), c),
        r"is a generator, as named parameters are, which come fourth: write DistributedOptimizer\(optimizer, algorithm",
    ),
    "Horovod's order without a communicator": (
        lambda c: DistributedOptimizer(SGD, MODEL.named_parameters(), Dense()),
        r"comm is Dense .*: the arguments are in another order: write DistributedOptimizer\(optimizer, algorithm, comm",
    ),
    "swapped": (lambda c: DistributedOptimizer(Dense(), SGD, c), "the optimizer comes before the algorithm"),
    "parameters": (
        lambda c: DistributedOptimizer(MODEL.parameters(), Dense(), c),
        "is of type generator: pass",
    ),
    "optimizer class": (
        lambda c: DistributedOptimizer(torch.optim.SGD, Dense(), c),
        "is the class SGD: pass",
    ),
    "method": (
        lambda c: DistributedOptimizer(SGD, Dense(), c, MODEL.named_parameters),
        r"is a method: pass model.named_parameters\(\), with the parentheses",
    ),
    "model": (lambda c: DistributedOptimizer(SGD, Dense(), c, MODEL), "is the model: pass model.named_parameters"),
    "nameless": (lambda c: DistributedOptimizer(SGD, Dense(), c, MODEL.parameters()), "tensors without names: pass"),
    "names": (lambda c: DistributedOptimizer(SGD, Dense(), c, ["weight"]), "no pairs of name and tensor: pass"),
    "first": (lambda c: DistributedOptimizer(c, SGD, Dense()), "in another order: write DistributedOptimizer"),
    "hook of a name": (lambda c: ddp_hook("dense", c), r"pass an instance, mpicomp.algorithm\('dense'\)"),
    "hook of a class": (lambda c: ddp_hook(Dense, c), r"the algorithm is a class: write Dense\(\)"),
    "hook, swapped": (lambda c: ddp_hook(c, Dense()), r"in another order: write ddp_hook\(algorithm, comm, model\)"),
    "no rate": (lambda c: OneBitAdam(MODEL.parameters(), c, comm=c), r"are not all numbers; write OneBitAdam\("),
    "one beta": (lambda c: OneBitAdam(MODEL.parameters(), betas=0.9, comm=c), "are not all numbers"),
    "broadcast, swapped": (
        lambda c: broadcast_parameters(c, MODEL),
        r"in another order: write broadcast_parameters\(model, comm, root=0\)",
    ),
    "broadcast of nothing": (lambda c: broadcast_parameters(c), r"write broadcast_parameters\(model, comm, root=0\)"),
    "Horovod's root": (
        lambda c: broadcast_parameters(MODEL.state_dict(), 0),
        r"comm is int 0: the root comes behind the communicator: write broadcast_parameters\(model, comm, root=0\)",
    ),
    "buffers, swapped": (
        lambda c: average_buffers(c, MODEL),
        r"in another order: write average_buffers\(model, comm\)",
    ),
    "buffers of none": (lambda c: average_buffers(MODEL, None), "comm is NoneType None: pass a Communicator"),
    "buffers of a dict": (
        lambda c: average_buffers(MODEL.state_dict(), c),
        "OrderedDict has no buffers: pass a module",
    ),
    "broadcast": (lambda c: broadcast_parameters(MODEL.parameters(), c), "no tensors by name; pass a module"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_first_mistake_is_told_with_rank_and_cure(mistake: str, comm: Communicator) -> None:
    call, told = WRONG[mistake]
    with pytest.raises(TypeError, match=f"^rank 0 of 1[:,] .*{told}") as caught:
        call(comm)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (MODEL.named_parameters(), "comm is generator <generator object Module.named_parameters>: pass a Communicator"),
        (MPI.COMM_WORLD, "wrap it"),
    ],
)
def test_what_is_no_communicator_is_refused(given: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        DistributedOptimizer(SGD, Dense(), given)


def test_a_missing_algorithm_is_named_with_the_whole_call() -> None:
    with pytest.raises(TypeError, match=r"^the algorithm is missing, .*: write DistributedOptimizer\(optimizer, alg"):
        DistributedOptimizer(SGD, named_parameters=MODEL.named_parameters())  # type: ignore[call-arg]


def test_a_dictionary_of_names_will_do(comm: Communicator) -> None:
    assert DistributedOptimizer(SGD, Dense(), comm, dict(MODEL.named_parameters())).comm is comm


def test_completion_leaves_out_names_of_the_library_s_own_use(comm: Communicator) -> None:
    model = nn.Linear(3, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), Dense(), comm)
    complete = rlcompleter.Completer({"optimizer": optimizer}).attr_matches  # of Python's prompt
    names = {found.strip("()").removeprefix("optimizer.") for found in complete("optimizer.")}
    assert {"step", "synchronize", "counted", "reducers"} & names == {"step", "synchronize"}
    assert {"counted", "reducers"} & {*dir(optimizer)} == set()
