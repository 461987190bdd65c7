"""Arguments of `start`, and errors for unusable ones."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpicomp import QSGD, Communicator, Dense, EFSignSGD, Marsit


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        (torch.float64, "float64"),
        (np.float16, "float16"),
        (np.dtype("f8"), "float64"),
        ("double", "float64"),
        (float, "float64"),
    ],
)
def test_types_are_taken_by_any_name(dtype: Any, name: str, comm: Communicator) -> None:
    assert Marsit().start(comm, 10, dtype=dtype).dtype == name


@pytest.mark.parametrize("n", [1e3, np.int32(1000), np.float64(1000)])
def test_whole_numbers_are_taken(n: Any, comm: Communicator) -> None:
    aggregator = Marsit().start(comm, n)
    assert type(aggregator.n) is int
    assert aggregator.aggregate(np.ones(1000, np.float32)).shape == (1000,)


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"n": 10.5}, TypeError, "10.5 is no number of elements: pass a whole one"),
        ({"n": np.ones(2)}, TypeError, "no number of elements: pass a whole one, such as vector.size"),
        (
            {"n": np.ones(2, np.float32)},
            TypeError,
            r"ndarray of shape \[2\] is no number of elements: pass .* len\(vector\), and the vector itself to agg",
        ),
        ({"n": torch.ones(1, dtype=torch.int64)}, TypeError, r"Tensor of shape \[1\] is no number of elements"),
        ({"n": [1, 2]}, TypeError, r"list \[1, 2\] is no number of elements"),
        ({"n": 10**12}, MemoryError, "10{12} elements of float32 takes 3,725.3 GiB, and this machine has [0-9.,]+ GiB"),
        (
            {"n": 10**30, "dtype": "bfloat16"},
            MemoryError,
            "elements of bfloat16 takes [0-9.,]+ GiB, and this machine has",
        ),
        ({"n": "10"}, TypeError, "'10' is no number of elements"),
        ({"n": -3}, ValueError, "0 or more elements, not -3"),
        ({"n": 3, "dtype": "bf16"}, TypeError, "no type 'bf16': choose one of float16, bfloat16, float32, float64"),
        ({"n": 3, "dtype": None}, TypeError, "no type None"),
        ({"n": 3, "dtype": torch.int32}, TypeError, "vectors of type int32: choose one of"),
        ({"n": 3, "tensor_lengths": [1.5]}, TypeError, "1.5 is no number of elements"),
    ],
)
def test_other_arguments_are_refused_in_one_sentence(
    arguments: dict[str, Any], error: type[Exception], told: str, comm: Communicator
) -> None:
    with pytest.raises(error, match=f"^rank 0 of 1, start: .*{told}") as caught:
        Marsit().start(comm, **arguments)
    assert caught.value.__suppress_context__


def test_arguments_in_another_order_and_mpis_own_communicators_are_refused(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=r"is int 1000: the arguments are in another order: write start\(comm, n\)"):
        Marsit().start(1000, comm)
    with pytest.raises(TypeError, match=r"wrap it: Communicator\(mpi_comm\)"):
        Marsit().start(MPI.COMM_WORLD, 1000)
    with pytest.raises(TypeError, match="pass a Communicator"):
        Marsit().start(None, 1000)


def test_a_method_that_finds_no_memory_says_what_there_is(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise MemoryError("Unable to allocate 7.45 GiB")

    monkeypatch.setattr(Marsit, "parts", no_room)
    told = (
        r"no memory for what Marsit\(.* keeps for 1000 elements \(Unable to allocate 7.45 GiB; this machine has .* GiB"
    )
    with pytest.raises(MemoryError, match=f"^rank 0 of 1, start: .*{told}"):
        Marsit().start(comm, 1000)


@pytest.mark.parametrize("method", [Marsit, Dense, QSGD])
def test_options_are_no_aggregator_and_a_class_has_no_options(method: Any, comm: Communicator) -> None:
    name = method.__name__
    for wanted in ("aggregate", "begin", "load_state_dict", "state_dict"):
        cure = rf"write aggregator = {name}\(\.\.\.\)\.start\(comm, n\), then aggregator\.{wanted}"
        with pytest.raises(AttributeError, match=f"'{name}' object has no attribute '{wanted}': .*{cure}"):
            getattr(method(), wanted)
    assert not hasattr(method(), "param_groups")
    for arguments in ((comm, 10), (comm,), ()):
        with pytest.raises(
            TypeError, match=rf"{name}\.start was called on the class.*: write {name}\(\)\.start\(comm, n\)"
        ):
            method.start(*arguments)
    assert method.start(method(), comm, 10).n == 10
    assert list(inspect.signature(method.start).parameters)[:2] == ["self", "comm"]


def test_shapes_of_tensors_reach_the_method_and_give_their_lengths(comm: Communicator) -> None:
    shapes = [(2, 40), (64,), (5, 1)]
    shaped = EFSignSGD().start(comm, 128 + 64 + 5, tensor_shapes=shapes)
    assert shaped.spec.tensor_shapes == tuple(shapes)
    assert shaped.spec.tensor_lengths == (80, 64, 5)
    assert QSGD().start(comm, 197, tensor_shapes=shapes).spec.tensor_shapes is None
    with pytest.raises(ValueError, match="tensor_lengths and tensor_shapes are both given: pass the shapes alone"):
        EFSignSGD().start(comm, 64, tensor_lengths=[64], tensor_shapes=[(8, 8)])
