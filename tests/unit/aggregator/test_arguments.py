"""What `start` takes, and what it says of what it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpicomp import Communicator, Marsit


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
        Marsit().start(1000, comm)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"wrap it: Communicator\(mpi_comm\)"):
        Marsit().start(MPI.COMM_WORLD, 1000)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass a Communicator"):
        Marsit().start(None, 1000)  # type: ignore[arg-type]
