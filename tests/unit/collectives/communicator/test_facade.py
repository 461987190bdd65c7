"""A communicator and the parts that it holds."""

from __future__ import annotations

import gc
import inspect
import re
import rlcompleter
from contextlib import suppress
from typing import Any
from weakref import ref

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from collectives.communicator import operands
from collectives.group.group import Group
from tests.documents import PROJECT, inline_code, prose
from tests.interruptions import interrupted_by


def test_a_communicator_is_no_part_of_a_cycle() -> None:
    """It is freed with its last reference, as a call in flight must be found then."""
    comm = Communicator(MPI.COMM_SELF)
    comm.allreduce(np.ones(100))
    comm.iallreduce(np.ones(100)).wait()
    comm.allgather_object("text")
    comm.close()
    freed = ref(comm)
    gc.collect()
    gc.disable()
    try:
        del comm
        assert freed() is None
    finally:
        gc.enable()


def test_completion_lists_the_names_that_the_page_describes() -> None:
    with Communicator(MPI.COMM_SELF) as comm:
        names = dir(comm)
        assert all(hasattr(comm, name) for name in names)
        complete = rlcompleter.Completer({"comm": comm}).attr_matches  # of Python's prompt
        assert {found.strip("()").removeprefix("comm.") for found in complete("comm.")} == {*names}
    page = set(re.findall(r"\w+", " ".join(inline_code(prose(PROJECT / "docs" / "communicator.md")))))
    assert not set(names) - page
    assert len(names) < 30
    assert {"allreduce", "begin"} & set(names) == {"allreduce"}


def test_a_handle_shows_its_call_and_whether_it_has_ended() -> None:
    with Communicator(MPI.COMM_SELF) as comm:
        handle = comm.iallreduce(np.ones(5), op="mean")
        handle.wait()
        assert repr(handle) == "<Handle of iallreduce(mean) of float64[5], rank 0 of 1: done>"
        receiving = comm.irecv(np.ones(2), source=0)
        pending = "<Handle of irecv of float64[2] from rank 0 with tag 0, rank 0 of 1: pending>"
        assert repr(receiving) == pending
        comm.send(np.ones(3), to=0)
        with pytest.raises(CollectiveMismatch):
            receiving.wait()
        assert repr(receiving).startswith(f"{pending[:-8]}failed, CollectiveMismatch: rank 0 of 1: irecv of")


def test_parts_know_that_the_communicator_ended() -> None:
    comm = Communicator(MPI.COMM_SELF)
    comm.ending.give_up(ValueError("enough"))
    assert isinstance(comm.calls.failure, ValueError)
    with pytest.raises(RuntimeError, match="cannot be used, an earlier call failed: ValueError"):
        comm.barrier()
    assert not comm.calls.ordered


def test_a_subclass_overrides_methods_that_parts_implement() -> None:
    class Counted(Communicator):
        runs = 0

        def run(self, call: Any, steps: Any) -> Any:
            self.runs += 1
            return super().run(call, steps)

    with Counted(MPI.COMM_SELF) as comm:
        comm.allreduce(np.ones(100))
        comm.barrier()
        assert comm.runs == 2


def test_the_class_has_all_methods_with_their_documentation() -> None:
    comm = Communicator(MPI.COMM_SELF)
    named = {**vars(Group), **vars(Communicator)}
    methods = [name for name in named if not name.startswith("_") and callable(getattr(comm, name))]
    for name in methods:
        assert inspect.getdoc(getattr(Communicator, name)), name
    assert {"run", "begin", "check", "await_request", "fixed_tag"} <= {*methods}
    comm.close()


def test_tags_of_users_that_are_not_made_are_taken_back() -> None:
    with Communicator(MPI.COMM_SELF) as comm:
        with comm.tags_unused():
            comm.fixed_tag()
        with suppress(ValueError), comm.tags_unused(unless_made=True):
            comm.fixed_tag()
            raise ValueError
        first = comm.fixed_tag()
        with comm.tags_unused(unless_made=True):
            second = comm.fixed_tag()
        assert [first, second, comm.fixed_tag()] == [1, 2, 3]


def test_an_exception_of_a_signal_handler_is_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the call as it is: a refusal would end the other ranks' call by CollectiveMismatch."""

    def interrupt(*_: object) -> None:
        raise RuntimeError("of a handler")

    monkeypatch.setattr(operands, "empty_like", interrupt)
    with Communicator() as comm, pytest.raises(RuntimeError, match=r"^of a handler$"):
        comm.allreduce(np.ones(3))


def test_an_exception_of_a_signal_handler_is_not_taken_for_an_object_that_cannot_be_pickled() -> None:
    class Interrupted:
        def __reduce__(self) -> str:
            interrupt()
            return "unreachable"

    with (
        Communicator() as comm,
        interrupted_by(KeyError("of a handler")) as interrupt,
        pytest.raises(KeyError, match="of a handler"),
    ):
        comm.allgather_object(Interrupted())
