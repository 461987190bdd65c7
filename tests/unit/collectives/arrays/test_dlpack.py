"""Arrays go in and out of every call as they are: the calls work on the caller's own memory, whatever the library."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from collectives import Communicator
from collectives.arrays.vectors import flat
from collectives.dense import allreduce, broadcast_gather
from collectives.threads.run_local import run_local
from mpicomp import Dense, Marsit
from mpicomp.aggregator.base import Aggregator

RANKS, N, TIMEOUT_S = 2, 300, 20.0


class Foreign:
    """An array of some other library, as far as DLPack knows it."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Namesake(Foreign):
    """One whose library can make others."""

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    device = "cpu"
    shape = property(lambda self: self.array.shape)

    def __array_namespace__(self) -> Any:
        return type(self)

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any, device: str) -> Namesake:
        assert device == "cpu"
        return cls(np.empty(shape, dtype))


def address(array: Any) -> int:
    """Where the elements of an array of any of these libraries begin."""
    if torch.is_tensor(array):
        return array.data_ptr()
    found: int = (array.array if isinstance(array, Foreign) else array).ctypes.data
    return found


KINDS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "numpy": lambda array: array,
    "torch": torch.from_numpy,
    "bfloat16": lambda array: torch.from_numpy(array).bfloat16(),
    "offset": lambda array: torch.cat([torch.zeros(4), torch.from_numpy(array)])[4:],
    "foreign": Foreign,
    "namesake": Namesake,
}
kinds = pytest.mark.parametrize("kind", KINDS)
that_can_be_made = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "foreign"])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses of all vectors that calls were given to work on."""
    addresses: set[int] = set()

    def observe(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def observed(*arguments: Any) -> Any:
            for one in arguments:
                one = getattr(one, "values", one)
                if isinstance(one, np.ndarray):
                    addresses.add(one.ctypes.data)
            return function(*arguments)

        monkeypatch.setattr(owner, name, observed)

    observe(allreduce, "dense_steps")
    observe(broadcast_gather, "broadcast_payload")
    observe(broadcast_gather, "gather_payloads")
    return addresses


def made(kind: str, comm: Communicator, n: int = N) -> Any:
    """An array of this rank."""
    return KINDS[kind](np.full(n, comm.rank + 1.0, np.float32))


@kinds
@pytest.mark.parametrize("topology", ["ring", "auto", "mpi"])
def test_sums_are_taken_from_and_written_to_the_callers_memory(kind: str, topology: str, seen: set[int]) -> None:
    def work(comm: Communicator) -> None:
        x, out = made(kind, comm), made(kind, comm)
        assert comm.allreduce(x, out=out) is out
        assert {address(x), address(out)} <= seen
        assert np.allclose(values(x), comm.rank + 1)
        assert np.allclose(values(out), 3)
        handle = comm.iallreduce(x, "mean", out)
        assert handle.wait() is out
        assert np.allclose(values(out), 1.5)
        assert comm.allreduce(x, out=x) is x
        assert np.allclose(values(x), 3)

    run_local(RANKS, work, topology, timeout=TIMEOUT_S)


@kinds
def test_a_sum_in_the_background_works_on_the_callers_memory(kind: str, seen: set[int]) -> None:
    def work(comm: Communicator) -> None:
        x, out = made(kind, comm), made(kind, comm)
        comm.iallreduce(x, "max", out).wait()
        assert {address(x), address(out)} <= seen
        assert np.allclose(values(out), 2)

    run_local(RANKS, work, timeout=TIMEOUT_S)


@kinds
def test_a_broadcast_lands_in_the_callers_memory(kind: str, seen: set[int]) -> None:
    def work(comm: Communicator) -> None:
        x = made(kind, comm)
        assert comm.broadcast(x, 1) is x
        assert address(x) in seen
        assert np.allclose(values(x), 2)

    run_local(RANKS, work, timeout=TIMEOUT_S)


@that_can_be_made
def test_rows_leave_from_the_callers_memory_and_land_in_the_result(kind: str, seen: set[int]) -> None:
    def work(comm: Communicator) -> None:
        x = made(kind, comm, 10 * (comm.rank + 1))
        result = comm.allgather(x)
        assert {address(x), address(result)} <= seen
        assert type(result) is type(x)
        assert np.allclose(values(result), [1] * 10 + [2] * 20)

    run_local(RANKS, work, timeout=TIMEOUT_S)


@that_can_be_made
def test_results_are_of_the_kind_of_what_went_in(kind: str) -> None:
    def work(comm: Communicator) -> None:
        x = made(kind, comm)
        for result in (comm.allreduce(x), comm.iallreduce(x).wait()):
            assert (type(result), result.dtype) == (type(x), x.dtype)
            assert np.allclose(values(result), 3)

    run_local(RANKS, work, timeout=TIMEOUT_S)


@pytest.mark.parametrize("call", ["allreduce", "iallreduce", "allgather"])
def test_a_library_that_cannot_make_a_result_is_told_so(call: str) -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(TypeError, match=f"rank {comm.rank} of 2, all.*: no other Foreign can be made"):
            getattr(comm, call)(made("foreign", comm))

    run_local(RANKS, work, timeout=TIMEOUT_S)


@kinds
@pytest.mark.parametrize("method", [Dense(), Marsit()], ids=lambda one: type(one).__name__)
def test_a_vector_call_holds_the_callers_memory(kind: str, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[tuple[int, int]] = set()
    open_call = Aggregator._open

    def opened(*arguments: Any) -> Any:
        call, steps = open_call(*arguments)
        held.add((address(call.values), address(call.out)))
        return call, steps

    monkeypatch.setattr(Aggregator, "_open", opened)

    def work(comm: Communicator) -> None:
        x, out, other = made(kind, comm), made(kind, comm), made(kind, comm)
        before = values(x).copy()
        aggregator = method.start(comm, N, dtype="bfloat16" if kind == "bfloat16" else "float32")
        assert aggregator.aggregate(x, out=out) is out
        assert aggregator.begin(x, other).wait() is other
        assert {(address(x), address(out)), (address(x), address(other))} <= held
        assert (values(x) == before).all()
        if kind == "foreign":
            with pytest.raises(TypeError, match=f"rank {comm.rank} of 2, vector 0: no other Foreign can be made"):
                aggregator.aggregate(x)
        else:
            result = aggregator.aggregate(x)
            assert (type(result), result.dtype) == (type(x), x.dtype)

    run_local(RANKS, work, "ring", timeout=TIMEOUT_S)


def values(array: Any) -> NDArray[np.float32]:
    """Its elements as NumPy has them."""
    if torch.is_tensor(array):
        wide: NDArray[np.float32] = array.float().numpy()
        return wide
    found: NDArray[np.float32] = array.array if isinstance(array, Foreign) else array
    return found


def test_a_vector_keeps_its_tensor_alive() -> None:
    tensor = torch.arange(10.0)
    values, alive = flat(tensor).values[2:], weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    assert values[0] == 2
    del values
    gc.collect()
    assert alive() is None
