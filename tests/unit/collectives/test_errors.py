"""An error with another text is of the same type, and nothing is lost where a type takes other arguments.

The exception of a signal handler is not taken for an error of the call that it interrupts.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from collectives.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    NonFiniteGradient,
    OutOfMemory,
    RanksLost,
    is_of_handler,
    reword,
)
from mpicomp.pipeline.agreement import MessagesDiffer
from mpicomp.pipeline.stage_checkpoints import StageLost
from tests.interruptions import interrupted_by


@pytest.mark.parametrize("kind", [ValueError, TypeError, MemoryError, OutOfMemory])
def test_an_error_is_reworded_in_its_type(kind: type[Exception]) -> None:
    assert type(reword(kind("before"), "after")) is kind
    assert str(reword(kind("before"), "after")) == "after"


def test_missing_memory_of_numpy_is_reworded_as_the_built_in_error() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 60, np.uint8)
    assert type(caught.value) is not MemoryError
    assert repr(reword(caught.value, "rank 1 of 2")) == "MemoryError('rank 1 of 2')"


@pytest.mark.parametrize(
    "error",
    [
        NonFiniteGradient("NaN", (1, 2)),
        CollectiveMismatch("the ranks differ", closes=True),
        RanksLost("rank 1 died", (0, 2)),
        CollectiveTimeout("nothing"),
        MessagesDiffer("stages 0 and 1 differ", [0]),
        StageLost("stage 1 is lost", (1,), step=3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_reaches_another_process_whole(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_exception_of_a_signal_handler_refuses_no_call(kind: type[Exception]) -> None:
    with interrupted_by(kind("of a handler")) as interrupt:
        try:
            interrupt()
        except kind as error:
            found = error
    assert is_of_handler(found)
    taken = ValueError("taken for an error of another library")
    taken.__cause__ = found
    for one in (found, taken):
        with pytest.raises(kind, match=r"^of a handler$"):
            reword(one, "rank 1 of 2: refused")


def test_other_exceptions_refuse_a_call() -> None:
    with pytest.raises(ValueError, match="reshape") as caught:
        np.zeros(3).reshape(2)
    assert not is_of_handler(caught.value)
    assert str(reword(caught.value, "rank 1 of 2: refused")) == "rank 1 of 2: refused"
