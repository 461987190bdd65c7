"""Messages between two ranks: content, order, collectives meanwhile, and errors."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from collectives import CollectiveMismatch, CollectiveTimeout, Communicator
from mpicomp import run_local
from tests.mpi.lanes import TIMEOUT_S, impatient

SIZES = (0, 1, 1000, 3_000_000)


def shift(comm: Communicator) -> tuple[int, int]:
    """The ranks above and below, in a ring."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def values(rank: int, n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32) + 1000 * rank


def pass_round(comm: Communicator, n: int) -> None:
    above, below = shift(comm)
    out = np.empty(n, np.float32)
    receiving = comm.irecv(out, below)
    sending = comm.isend(values(comm.rank, n), above)
    assert sending.wait() is None
    assert receiving.wait() is out
    np.testing.assert_array_equal(out, values(below, n))


@pytest.mark.parametrize("n", SIZES)
def test_what_is_sent_arrives(comm: Communicator, n: int) -> None:
    pass_round(comm, n)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_in_threads_pass_messages_alike(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        for n in SIZES[:3]:
            pass_round(comm, n)
        with comm.grid(replica=1, stage=ranks) as grid:
            pass_round(grid.along("stage"), 10)

    run_local(ranks, work)


def test_blocking_calls_and_tensors_of_any_type_and_shape(comm: Communicator) -> None:
    above, below = shift(comm)
    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.bool):
        x = torch.full((3, 4), comm.rank).to(dtype)
        out = torch.zeros_like(x)
        where = out.data_ptr()
        if comm.rank % 2 or comm.size == 1:
            receiving = comm.irecv(out, below, tag=300)
            comm.send(x, above, tag=300)
            receiving.wait()
        else:
            sending = comm.isend(x, above, tag=300)
            assert comm.recv(out, below, tag=300) is out
            sending.wait()
        assert out.data_ptr() == where
        assert torch.equal(out, torch.full((3, 4), below).to(dtype))


def test_messages_of_a_tag_keep_their_order_and_tags_do_not_mix(comm: Communicator) -> None:
    above, below = shift(comm)
    outs = {(tag, i): np.empty(1 + 5000 * i, np.float32) for tag in (0, 7) for i in range(3)}
    receives = [comm.irecv(out, below, tag) for (tag, _), out in reversed(outs.items())]
    sends = [comm.isend(values(comm.rank + 10 * tag, 1 + 5000 * i), above, tag) for tag in (0, 7) for i in (2, 1, 0)]
    for handle in (*receives, *sends):
        handle.wait()
    for (tag, i), out in outs.items():
        np.testing.assert_array_equal(out, values(below + 10 * tag, 1 + 5000 * i))


def test_messages_go_on_beside_collectives(comm: Communicator) -> None:
    above, below = shift(comm)
    out = np.empty(200_000, np.float32)
    receiving = comm.irecv(out, below)  # some ranks send before the collective, some behind it
    if comm.rank % 2:
        sending = comm.isend(values(comm.rank, out.size), above)
    assert comm.allreduce(1) == comm.size
    if comm.rank % 2 == 0:
        sending = comm.isend(values(comm.rank, out.size), above)
    handle = comm.iallreduce(np.ones(50_000, np.float32))
    receiving.wait()
    sending.wait()
    assert (handle.wait() == comm.size).all()
    np.testing.assert_array_equal(out, values(below, out.size))


def test_no_collective_takes_a_message_of_any_tag(comm: Communicator) -> None:
    last = comm.size - 1
    for tag in (0, 50, 52, 100, 300):
        sending = comm.isend(values(tag, 10), last, tag) if comm.rank == 0 else None
        comm.barrier()  # whose messages come to the last rank behind the one that it has yet to receive
        if comm.rank == last:
            np.testing.assert_array_equal(comm.recv(np.empty(10, np.float32), 0, tag), values(tag, 10))
        if sending is not None:
            sending.wait()
        comm.barrier()


def test_a_progress_thread_drives_messages(comm: Communicator) -> None:
    if not comm.start_progress_thread():
        pytest.skip("MPI runs without MPI_THREAD_MULTIPLE")
    above, below = shift(comm)
    out = np.empty(500_000, np.float32)
    handles = [comm.irecv(out, below), comm.isend(values(comm.rank, out.size), above)]
    limit = time.monotonic() + TIMEOUT_S
    while not all(handle.poll() for handle in handles) and time.monotonic() < limit:
        time.sleep(0.001)
    np.testing.assert_array_equal(out, values(below, out.size))
    for handle in handles:
        handle.wait()


@pytest.mark.parametrize("sent", [np.zeros(7, np.float32), np.zeros((2, 4), np.float32), np.zeros(8, np.int32)])
def test_another_dtype_or_shape_is_a_mismatch_and_loses_nothing_else(comm: Communicator, sent: np.ndarray) -> None:
    above, below = shift(comm)
    comm.isend(sent, above).detach()
    with pytest.raises(CollectiveMismatch, match=rf"irecv of float32\[8\] from rank {below} .* sends {sent.dtype}\["):
        comm.irecv(np.zeros(8, np.float32), below).wait()
    pass_round(comm, 100)
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("sizes", [(1000, 1000), (300_000, 300_000), (10, 300_000), (300_000, 10)], ids=str)
def test_receives_take_messages_in_their_order_whichever_is_waited_for_first(
    sizes: tuple[int, int], background: bool, comm: Communicator
) -> None:
    above, below = shift(comm)
    if background:
        comm.start_progress_thread()
    for pause in (0.0, 0.05):
        outs = [np.zeros(n, np.float32) for n in sizes]
        receives = [comm.irecv(out, below) for out in outs]
        sends = [comm.isend(np.full(n, place, np.float32), above) for place, n in enumerate(sizes, 1)]
        time.sleep(pause)  # both messages may have come when the later receive is polled first
        for handle in (*reversed(receives), *sends):
            handle.wait()
        assert [out.mean() for out in outs] == [1, 2]


def test_a_blocking_receive_leaves_its_message_to_one_that_was_begun_before(comm: Communicator) -> None:
    above, below = shift(comm)
    first, second = np.zeros(2000), np.zeros(2000)
    receiving = comm.irecv(first, below)
    sends = [comm.isend(np.full(2000, place), above) for place in (1.0, 2.0)]
    time.sleep(0.02)
    comm.recv(second, below)
    for handle in (receiving, *sends):
        handle.wait()
    assert (first.mean(), second.mean()) == (1, 2)


def test_ranks_in_threads_receive_in_order_too() -> None:
    def work(comm: Communicator) -> None:
        above, below = shift(comm)
        outs = [np.zeros(5), np.zeros(5)]
        receives = [comm.irecv(out, below) for out in outs]
        sends = [comm.isend(np.full(5, place), above) for place in (1.0, 2.0)]
        comm.barrier()
        for handle in (*reversed(receives), *sends):
            handle.wait()
        assert [out.mean() for out in outs] == [1, 2]

    run_local(3, work)


def test_a_message_in_blocks_arrives(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.communicator.inbox.LONGEST_BYTES", 1000)
    pass_round(comm, 1777)


@pytest.mark.parametrize("options", [{}, {"verify": False}, {"checksums": True}], ids=str)
@pytest.mark.parametrize("n", [8, 4000, 400_000])
def test_too_long_a_message_is_a_mismatch_and_writes_nowhere(
    n: int, options: dict[str, Any], mpi_comm: MPI.Intracomm
) -> None:
    """Open MPI writes a long message beyond the memory of a receive that is too short for it."""
    with Communicator(mpi_comm, timeout=TIMEOUT_S, **options) as comm:
        above, below = shift(comm)
        out = np.zeros(3 * n, np.float32)
        comm.isend(np.ones(2 * n, np.float32), above).detach()
        with pytest.raises(CollectiveMismatch, match=rf"irecv of float32\[{n}\] .* sends float32\[{2 * n}\]"):
            comm.irecv(out[:n], below).wait()
        assert not out[n:].any()
        pass_round(comm, 100)


def test_what_cannot_be_sent_or_received_is_told_at_once(comm: Communicator) -> None:
    x = np.zeros(8, np.float32)
    for error, message, call in (
        (
            ValueError,
            f"isend: there is no rank {comm.size}: pass one from 0 to {comm.size - 1}$",
            lambda: comm.isend(x, comm.size),
        ),
        (ValueError, "irecv: there is no rank -1", lambda: comm.irecv(x, -1)),
        (ValueError, r"send: the tag must lie in 0 .. 300, not 301", lambda: comm.send(x, 0, 301)),
        (TypeError, "isend: cannot send list", lambda: comm.isend([1.0], 0)),
        (TypeError, "irecv: cannot receive float: pass a NumPy array", lambda: comm.irecv(1.0, 0)),
        (TypeError, "send: cannot send elements of type complex64", lambda: comm.send(x.astype(np.complex64), 0)),
        (TypeError, r"send: to is 1\.0: pass an integer$", lambda: comm.send(x, 1.0)),
        (TypeError, r"irecv: source is None: pass an integer$", lambda: comm.irecv(x, None)),
        (TypeError, r"irecv: tag is 0\.5: pass an integer$", lambda: comm.irecv(x, 0, 0.5)),
        (ValueError, "isend: .*strides", lambda: comm.isend(x[::2], 0)),
    ):
        with pytest.raises(error, match=rf"rank {comm.rank} of {comm.size}, {message}"):
            call()
    x.flags.writeable = False
    with pytest.raises(ValueError, match="recv: the array is read-only"):
        comm.recv(x, 0)
    pass_round(comm, 10)


def test_a_message_that_does_not_come_ends_in_a_timeout_that_names_the_rank(mpi_comm: MPI.Intracomm) -> None:
    comm = impatient(mpi_comm, 0.5, abort_hook=False)
    _, below = shift(comm)
    with pytest.raises(
        CollectiveTimeout, match=rf"nothing from rank {below}; irecv of float32\[8\] from rank {below} "
    ):
        comm.irecv(np.zeros(8, np.float32), below).wait()


def test_a_slow_sender_is_waited_for_as_long_as_a_rank_that_comes_late(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=1.5, arrival_timeout=TIMEOUT_S) as comm:
        above, below = shift(comm)
        out = np.empty(8, np.float32)
        receiving = comm.irecv(out, below)
        if comm.rank == 0:
            time.sleep(2.0)
        comm.isend(values(comm.rank, 8), above).detach()
        receiving.wait()
        comm.barrier()
    np.testing.assert_array_equal(out, values(below, 8))
