"""Emulated links: messages take at least the time of the link, and results stay the same."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator, Ring, Star
from collectives.cost.rate import EmulatedLink
from collectives.emulation import link_clock, slow_link
from collectives.emulation.slow_link import HeldSend, SlowLink
from collectives.recovery.fault_tolerance import look
from collectives.threads.run_local import run_local
from mpicomp import Dense, DoubleSqueeze, Marsit, ScaleCom

RATE = 12.5e6  # bytes a second of 100 Mbit/s


class Request:
    """Request that MPI ends at once."""

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        return True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which the link sees."""
    clock = [100.0]
    monkeypatch.setattr(slow_link.time, "perf_counter", lambda: clock[0])
    return clock


def test_messages_leave_one_after_another_and_arrive_a_latency_later(now: list[float]) -> None:
    link, started = SlowLink(EmulatedLink.parse("100mbit,1ms")), []

    def post(name: str, nbytes: int) -> HeldSend:
        send = HeldSend(link, nbytes, lambda: started.append(name) or Request())
        send.Start()
        return send

    first, second = post("first", 125_000), post("second", 12_500)
    each = [link.seconds(nbytes) for nbytes in (125_000, 12_500)]
    assert each[0] == pytest.approx(0.01 * (1 + 66 / 1448), rel=1e-3)
    now[0] += each[0] + 0.0009
    assert not second.Test()
    assert not started
    now[0] += 0.0002
    assert not second.Test()  # which gives the first one to MPI
    assert started == ["first"]
    assert first.Test()
    now[0] += each[1]
    assert second.Test()
    assert started == ["first", "second"]
    now[0] += 1
    post("third", 12_500)
    assert link.rest_s(10) == pytest.approx(each[1] + 0.001)  # the link was free meanwhile


def test_an_error_of_mpi_is_raised_where_the_message_is_awaited(now: list[float]) -> None:
    def fail() -> None:
        raise RuntimeError("the communicator has ended")

    link = SlowLink(EmulatedLink.parse("100mbit"))
    lost, other = HeldSend(link, 1000, fail), HeldSend(link, 1000, Request)
    for send in (lost, other):
        send.Start()
    now[0] += 1
    assert other.Test()
    with pytest.raises(RuntimeError, match="has ended"):
        lost.Test()


def test_messages_of_several_senders_share_the_receivers_link(now: list[float]) -> None:
    link = SlowLink(EmulatedLink.parse("100mbit"))
    each = link.seconds(125_000)
    assert [link.arrive(125_000) - 100 for _ in range(3)] == pytest.approx([0, each, 2 * each])
    now[0] += 10
    assert link.arrive(125_000) == now[0]
    assert not link._releases  # those of before are forgotten


WORK: dict[str, Callable[[Communicator], Any]] = {
    "sum": lambda comm: comm.allreduce(np.arange(5000.0) * comm.rank),
    "in flight": lambda comm: [
        call.wait() for call in [comm.iallreduce(np.full(3000, comm.rank + k, np.float32)) for k in range(4)]
    ],
    "number": lambda comm: comm.allreduce(float(comm.rank), "max"),
    "objects": lambda comm: comm.allgather_object({"rank": comm.rank}),
    "rows": lambda comm: comm.allgather(np.full((2, 3), comm.rank)),
    "broadcast": lambda comm: comm.broadcast(np.full(3000, comm.rank), root=comm.size - 1),
    "group": lambda comm: comm.split(comm.rank % 2).allreduce(np.full(1000, comm.rank, np.float32)),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("work", WORK)
def test_results_are_those_without_a_link(work: str, ranks: int) -> None:
    expected, found = (run_local(ranks, WORK[work], link=link) for link in (None, "1gbit,10us"))
    np.testing.assert_equal(found, expected)


@pytest.mark.parametrize("topology", ["ring", "star", "torus", "double-tree"])
@pytest.mark.parametrize("method", [Dense(), Marsit(full_precision_every=3), DoubleSqueeze(), ScaleCom(10)], ids=repr)
def test_methods_have_the_same_results(method: Any, topology: str) -> None:
    def work(comm: Communicator) -> list[Any]:
        aggregator, x = method.start(comm, 3000), np.random.default_rng(comm.rank).standard_normal(3000, np.float32)
        return [aggregator.aggregate(x) for _ in range(4)]

    expected, found = (run_local(4, work, topology, link=link) for link in (None, "1gbit"))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("topology", "of_link"), [(Ring(), 4 / 3), (Star(), 2.0)], ids=repr)
def test_a_sum_takes_at_least_the_time_of_its_bytes(topology: Any, of_link: float) -> None:
    """A rank of a ring of 3 sends 4/3 of a vector; a server receives and sends two."""
    n = 60_000

    def work(comm: Communicator) -> float:
        x = np.ones(n, np.float32)
        comm.allreduce(x)
        comm.barrier()
        start = time.perf_counter()
        comm.allreduce(x)
        comm.barrier()
        return time.perf_counter() - start

    assert min(run_local(3, work, topology, link="100mbit")) > 4 * n * of_link / RATE


# Nodes ---------------------------------------------------------------------------------------------------------------


def seconds(comm: Communicator, sender: int, receiver: int, n: int) -> float:
    """Return the time of a message of `n` bytes on the slower one of its ranks; 0 on others."""
    x = np.zeros(n, np.uint8)
    comm.barrier()
    start = time.perf_counter()
    if comm.rank == sender:
        comm.send(x, receiver)
    elif comm.rank == receiver:
        comm.recv(x, sender)
    else:
        return 0.0
    return time.perf_counter() - start


@pytest.mark.parametrize("work", WORK)
def test_results_are_the_same_where_nodes_share_links(work: str) -> None:
    expected = run_local(3, WORK[work])
    np.testing.assert_equal(run_local(3, WORK[work], link="1gbit,10us", ranks_per_node=2), expected)


def is_soon(measure: Callable[[], float], limit: float) -> bool:
    """Return True if one of ten measurements is below a limit: a rank may get the processor late, but not each time."""
    return any(measure() < limit for _ in range(10))


def test_messages_within_a_node_are_not_held_back() -> None:
    def work(comm: Communicator) -> tuple[float, float]:
        return seconds(comm, 0, 1, 125_000), seconds(comm, 1, 2, 125_000)

    def within() -> float:
        found = run_local(3, work, link="10mbit", ranks_per_node=2)
        assert max(between for _, between in found) > 0.1
        return max(within for within, _ in found)

    assert is_soon(within, 0.05)


@pytest.mark.parametrize("shared_by", [1, 2])
def test_ranks_of_a_node_share_its_link(shared_by: int) -> None:
    """Ranks 0 and 1 send 125 kB each to ranks 2 and 3, at 10 Mbit/s."""

    def work(comm: Communicator) -> tuple[float, float]:
        pair = comm.split(comm.rank % 2)
        comm.barrier()
        start = time.perf_counter()
        seconds(pair, 0, 1, 125_000)
        return start, time.perf_counter()

    def both() -> float:
        starts, ends = zip(*run_local(4, work, link="10mbit", ranks_per_node=shared_by), strict=True)
        found = max(ends) - min(starts)  # a pair whose processor comes late sends on a free link
        assert found > 0.1 * shared_by
        return found

    assert is_soon(both, 0.1 * shared_by + 0.09)


def test_a_group_within_a_node_does_not_wait_for_collectives_of_mpi() -> None:
    def work(comm: Communicator) -> tuple[float, float]:
        times = []
        for group in (comm.nodes.local, comm):
            comm.barrier()
            start = time.perf_counter()
            group.allgather(np.zeros(3))
            times.append(time.perf_counter() - start)
        return times[0], times[1]

    def within() -> float:
        found = run_local(4, work, link="1gbit,100ms", ranks_per_node=2)
        assert max(between for _, between in found) > 0.1
        return max(within for within, _ in found)

    assert is_soon(within, 0.1)


def test_a_rank_without_a_color_is_in_no_group() -> None:
    with Communicator(link="1gbit") as comm:
        assert comm.mpi_comm.Split(MPI.UNDEFINED, 0) == MPI.COMM_NULL


def test_each_rank_is_a_node_over_links_of_ranks_and_in_communicators_of_the_same_link() -> None:
    def sizes(comm: Communicator) -> list[tuple[int, ...]]:
        with Communicator(comm.mpi_comm) as same, comm.split(comm.rank // 3) as part:
            return [one.nodes.sizes for one in (comm, same, part)]

    assert run_local(4, sizes, link="1gbit")[0] == [(1,) * 4, (1,) * 4, (1,) * 3]
    assert run_local(4, sizes, link="1gbit", ranks_per_node=2)[0] == [(2, 2), (2, 2), (2, 1)]


def test_a_node_without_a_file_for_its_link_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: str) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(link_clock.tempfile, "mkstemp", fail)
    errors: list[str] = []

    def work(comm: Communicator) -> None:
        with pytest.raises(OSError) as caught:
            Communicator(comm.mpi_comm, link="1gbit", ranks_per_node=2)
        errors.append(str(caught.value))

    run_local(3, work)
    cause = "no file for the link of this rank's node: No space left on device"
    assert set(errors) == {f"rank 0 of 3: link: {cause}; make room there, or set TMPDIR"}


# Arguments -----------------------------------------------------------------------------------------------------------


def test_ranks_with_different_links_are_refused() -> None:
    def work(comm: Communicator) -> None:
        with Communicator(comm.mpi_comm, link=("1gbit", "100mbit")[comm.rank]) as slow:
            slow.allreduce(np.ones(3))

    with pytest.raises(CollectiveMismatch, match="emulated link of"):
        run_local(2, work)


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("fast", "link='fast' is no link: write a rate"),
        (100, "link=100: pass a text such as '100mbit'"),
        ("1000gbit", r"link: 1000 Gbit/s is faster than messages are copied here \(.* can be emulated\)"),
    ],
)
def test_what_is_no_link_is_refused_with_the_cure(link: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"rank 0 of 1: {message}"):
        Communicator(link=link)


def test_a_communicator_has_one_link() -> None:
    with Communicator(link="1gbit") as comm:
        assert repr(comm) == "<Communicator rank 0 of 1, auto, emulated link of 1 Gbit/s>"
        assert not comm.one_node
        with pytest.raises(ValueError, match="has an emulated link of 1 Gbit/s already: leave out link"):
            Communicator(comm.mpi_comm, link="1gbit")


def test_a_trace_names_the_link(tmp_path: Path) -> None:
    with Communicator(link="1gbit,50us", trace=tmp_path) as comm:
        comm.allreduce(np.ones(3))
    assert json.loads((tmp_path / "rank-0.json").read_text())["otherData"]["link"] == "1 Gbit/s, 50 us"


def test_a_link_is_looked_at_for_deaths() -> None:
    """Ranks of a node that wait for each other in shared memory do so."""
    assert run_local(2, lambda comm: look(comm.mpi_comm), link="1gbit") == [None, None]
