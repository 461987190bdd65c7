"""Dense sums of arrays on devices are added there, with the bits of the host, whatever way the messages go."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, Communicator, HalvingDoubling, Ring, Star, Topology, Tree
from collectives.arrays import CUDA, MAKERS
from collectives.arrays.elements import narrow
from collectives.arrays.gpu_mpi import verdict
from collectives.arrays.gpu_mpi.verdict import Outcome
from collectives.dense import device_sum
from collectives.dense.device_sum import RECEIVE_BUFFERS, DevicePayload
from collectives.threads.run_local import run_local
from tests.fake_device import FakeArray, FakeDevice, order_of_test

N = 1000
PIECE_BYTES = 256


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeDevice]:
    """Give the fake devices, which are made on their first use, and let all vectors be long."""
    known: dict[int, FakeDevice] = {}
    monkeypatch.setitem(MAKERS, CUDA, lambda index: known.setdefault(index, FakeDevice(index, order_of_test())))
    monkeypatch.setattr(device_sum, "STAGED_BYTES", 0)
    monkeypatch.setattr(device_sum, "DIRECT_BYTES", 0)
    return known


@pytest.fixture
def payloads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Give whether each sum that was added on a device had its messages go there directly."""
    added: list[bool] = []
    make = DevicePayload.__init__

    def noted(self: DevicePayload, *about: Any, **options: Any) -> None:
        make(self, *about, **options)
        added.append(about[-1])

    monkeypatch.setattr(DevicePayload, "__init__", noted)
    return added


def aware(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """Let MPI take memory of fake devices, which is the host's; or not."""
    monkeypatch.setattr(verdict, "carries", lambda comm: True)
    monkeypatch.setattr(verdict.verdict, "outcome", Outcome(works, "was faked"))


def vector(rank: int, dtype: str) -> Any:
    values = np.random.default_rng(rank).standard_normal(N) * 100
    if dtype == "bfloat16":
        bits = np.empty(N, np.uint16)
        narrow(values.astype(np.float32), dtype, bits)
        return bits
    return values.astype(dtype)


def array(comm: Communicator, values: Any, dtype: str, ranks: tuple[int, ...]) -> Any:
    """An array of this rank, on a device on these ranks alone."""
    if comm.rank in ranks:
        return FakeArray(values, dtype, comm.rank)
    if dtype != "bfloat16":
        return values
    torch = pytest.importorskip("torch")
    return torch.from_numpy(values).view(torch.bfloat16)


def read(result: Any) -> Any:
    if isinstance(result, FakeArray):
        return result.there
    if isinstance(result, np.ndarray):
        return result
    import torch

    return result.view(torch.uint16).numpy()


def results(comm: Communicator, dtype: str, op: Any, ranks: tuple[int, ...]) -> list[Any]:
    """A blocking call in place, and two in the background at once."""
    first, second = (array(comm, vector(comm.rank, dtype), dtype, ranks) for _ in range(2))
    handles = comm.iallreduce(first, op), comm.iallreduce(second, op)
    found = [read(handle.wait()) for handle in handles]
    assert comm.allreduce(first, op, out=first) is first
    return [*found, read(first)]


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1,)], ids=["all", "one"])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("float32", "sum"), ("float32", "mean"), ("float64", "mean"), ("float64", "max"), ("float16", "mean"),
        ("bfloat16", "sum"), ("bfloat16", "min"), ("int32", "sum"), ("int64", "max"),
    ],
)  # fmt: skip
def test_bits_are_those_of_the_host(
    dtype: str, op: str, ranks: tuple[int, ...], direct: bool, payloads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    aware(monkeypatch, direct)
    plain = run_local(3, lambda comm: results(comm, dtype, op, ()), Ring(), piece_bytes=PIECE_BYTES)
    assert not payloads
    found = run_local(3, lambda comm: results(comm, dtype, op, ranks), Ring(), piece_bytes=PIECE_BYTES)
    assert payloads == [direct] * 3 * len(ranks)
    for one, expected in zip(found, plain, strict=True):
        for here, there in zip(one, expected, strict=True):
            np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, None], ids=["pieces", "stepwise"])
@pytest.mark.parametrize("topology", [HalvingDoubling(), Tree(), Star()], ids=lambda one: one.name)
def test_every_topology_can(
    topology: Topology, piece_bytes: int | None, direct: bool, payloads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    aware(monkeypatch, direct)
    plain = run_local(4, lambda comm: results(comm, "float16", "mean", ()), topology, piece_bytes=piece_bytes)
    found = run_local(4, lambda comm: results(comm, "float16", "mean", (0, 2, 3)), topology, piece_bytes=piece_bytes)
    assert payloads == [direct] * 9
    np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_nan_and_infinity_come_out_as_on_the_host(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    aware(monkeypatch, direct)

    def take(comm: Communicator, ranks: tuple[int, ...]) -> list[Any]:
        x = vector(comm.rank, "float32")
        x[comm.rank :: 7], x[3 - comm.rank :: 11] = np.nan, np.inf
        return [read(comm.allreduce(array(comm, x, "float32", ranks), op)) for op in ("sum", "min", "max")]

    plain, mixed = (run_local(2, partial(take, ranks=ranks), Ring()) for ranks in ((), (0,)))
    np.testing.assert_array_equal(mixed, plain)


def test_nothing_but_pieces_crosses_where_mpi_is_not_aware_and_nothing_where_it_is(
    made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(comm: Communicator) -> int:
        x = FakeArray(vector(comm.rank, "float32"), index=comm.rank)
        comm.allreduce(x)
        return sum(made[comm.rank].copied)

    aware(monkeypatch, works=False)
    # of two ranks each takes half a vector in and lets half out to be added, and gets half a result
    staged = run_local(2, take, Ring())
    assert all(1.9 * N * 4 <= nbytes <= 2.1 * N * 4 for nbytes in staged), staged
    made.clear()
    aware(monkeypatch, works=True)
    assert run_local(2, take, Ring()) == [0, 0]


@pytest.mark.parametrize("topology", ["auto", "mpi"], ids="by {}".format)
def test_what_mpi_itself_sums_goes_through_the_host(
    topology: str, payloads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks must then hand it to MPI, also those that have no device."""
    aware(monkeypatch, works=True)

    def take(comm: Communicator) -> Any:
        return read(comm.allreduce(array(comm, np.ones(1 << 16), "float64", (0,))))

    for found in run_local(3, take, topology):
        np.testing.assert_array_equal(found, 3.0)
    assert not payloads


def test_short_vectors_go_through_the_host_as_a_whole(payloads: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    aware(monkeypatch, works=False)
    monkeypatch.setattr(device_sum, "STAGED_BYTES", 4 * N + 1)
    run_local(2, lambda comm: comm.allreduce(array(comm, vector(0, "float32"), "float32", (0, 1))), Ring())
    assert not payloads


def test_where_memory_is_missing_the_vector_goes_through_the_host_as_a_whole(
    made: dict[int, FakeDevice], payloads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, and the others do not notice."""
    aware(monkeypatch, works=False)

    def take(comm: Communicator) -> Any:
        x = array(comm, vector(comm.rank, "float32"), "float32", (0, 1))
        handle = comm.iallreduce(x)
        return read(handle.wait())

    def full(n: int, dtype: str) -> Any:
        raise RuntimeError("out of memory")

    made[1] = FakeDevice(1)
    made[1].zeros = full
    for found in run_local(2, take, Ring()):
        np.testing.assert_array_equal(found, vector(0, "float32") + vector(1, "float32"))
    assert payloads == [False]


@pytest.mark.parametrize("background", [False, True])
def test_where_no_memory_is_left_at_all_every_rank_is_told_and_can_go_on(
    background: bool, made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    aware(monkeypatch, works=False)
    made[1] = FakeDevice(1)
    made[1].has_memory = False

    def take(comm: Communicator) -> Any:
        x = array(comm, vector(comm.rank, "float32"), "float32", (0, 1))
        error = MemoryError if comm.rank == 1 else CollectiveMismatch
        with pytest.raises(error, match=r"rank 1.* i?allreduce\(sum\).*no pinned memory to take 1000 elements"):
            comm.iallreduce(x).wait() if background else comm.allreduce(x)
        made[1].has_memory = True
        comm.barrier()
        return read(comm.allreduce(x))

    for found in run_local(2, take, Ring()):
        np.testing.assert_array_equal(found, vector(0, "float32") + vector(1, "float32"))


def pinned_bytes(made: dict[int, FakeDevice], ranks: int, call: Callable[[Communicator, Any], object]) -> list[int]:
    """Give how many bytes each rank's device has pinned for calls of an array there, by a star with 8 chunks."""
    bytes_of = [0] * ranks
    for rank in range(ranks):
        made[rank] = FakeDevice(rank)

        def noted(nbytes: int, rank: int = rank, pin: Any = made[rank].pinned) -> Any:
            bytes_of[rank] += nbytes
            return pin(nbytes)

        made[rank].pinned = noted
    run_local(ranks, lambda comm: call(comm, FakeArray(vector(0, "float32"), index=comm.rank)), Star())
    return bytes_of


@pytest.mark.parametrize("background", [False, True])
def test_an_array_that_is_summed_on_the_device_takes_no_memory_of_the_host_but_for_messages(
    background: bool, made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are the vector, of which 1/8 each is buffered when it comes to be added."""

    def take(comm: Communicator, x: Any) -> None:
        comm.iallreduce(x, out=x).wait() if background else comm.allreduce(x)

    aware(monkeypatch, works=False)
    assert pinned_bytes(made, 2, take) == [4 * N + RECEIVE_BUFFERS * 4 * 128] * 2
    aware(monkeypatch, works=True)
    assert pinned_bytes(made, 2, take) == [0, 0]
    assert pinned_bytes(made, 1, take) == [0]


def test_one_rank_alone_copies(payloads: list[bool], comm: Communicator) -> None:
    x = FakeArray(vector(0, "float32"))
    for found in (comm.allreduce(x), comm.iallreduce(x).wait()):
        np.testing.assert_array_equal(found.there, x.there)
    assert not payloads


def test_a_device_that_is_gone_ends_the_call(made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    aware(monkeypatch, works=False)

    made[0] = FakeDevice(0)
    made[0].broken = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        run_local(2, lambda comm: comm.allreduce(array(comm, vector(0, "float32"), "float32", (0, 1))), Ring())


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_a_device_that_computes_longer_than_the_timeout_comes_late_and_is_not_silent(
    direct: bool, made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    aware(monkeypatch, direct)
    made[0] = FakeDevice(0)
    ready, done = time.monotonic() + 1.5, made[0].done

    class Busy:
        def __init__(self) -> None:
            self.then = done()

        def Test(self) -> bool:  # noqa: N802 - MPI's name
            return time.monotonic() > ready and self.then.Test()

    made[0].done = Busy
    options: dict[str, Any] = {"timeout": 0.5, "arrival_timeout": 60}
    for found in run_local(2, lambda comm: results(comm, "float32", "sum", (0,)), Ring(), **options):
        np.testing.assert_array_equal(found[0], vector(0, "float32") + vector(1, "float32"))
