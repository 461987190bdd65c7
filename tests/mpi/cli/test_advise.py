"""Ranks measure their network, and all of them use the same figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomp
from collectives import Communicator, Ring
from collectives.cost.link import LinkModel
from collectives.group.routes import fastest
from collectives.network_probe import measure_network
from mpicomp.cli import advise
from mpicomp.cli.advise.speeds import Speed
from mpicomp.cli.main import main
from tests.mpi.lanes import few_ranks

WORLD = MPI.COMM_WORLD
TWO_LEVEL = LinkModel(1e-5, 1e9, group_size=2, between_latency_s=1e-4, uplink_bytes_s=1e7)


@pytest.mark.mpi(min_size=2)
def test_every_rank_finds_the_same_network() -> None:
    with Communicator() as comm:
        found = measure_network(comm)
    assert len(set(WORLD.allgather(found))) == 1
    assert found.latency_s >= 0
    assert found.bandwidth_bytes_s > 1e6


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(("slow_calls", "group_size"), [(1, None), (2, 2)])
def test_groups_must_be_found_twice(slow_calls: int, group_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[bool] = Counter()

    def seconds(comm: Communicator, peers: tuple[int, int]) -> float:
        beyond = peers == ((comm.rank + 2) % 4, (comm.rank - 2) % 4)
        calls[beyond] += 1
        return 1e-3 if beyond and calls[beyond] <= slow_calls else 1e-4

    monkeypatch.setattr("collectives.network_probe._seconds_a_message", seconds)
    with Communicator() as comm:
        found = measure_network(comm)
    assert found.group_size == group_size
    assert found.uplink_bytes_s == (None if group_size is None else 2 * comm.routes.packed_piece_bytes() / 1e-3)


@pytest.mark.parametrize("n", [1, 1000, 100_000, pytest.param(2_000_000, marks=few_ranks)])
def test_auto_goes_by_the_network_and_sums_right(n: int) -> None:
    x = np.arange(n, dtype=np.float32) % 7 + WORLD.rank
    expected = WORLD.size * (np.arange(n, dtype=np.float32) % 7) + sum(range(WORLD.size))
    with Communicator(network=TWO_LEVEL) as comm:
        assert np.array_equal(comm.allreduce(x), expected)
        assert np.array_equal(comm.iallreduce(x).wait(), expected)
        method = mpicomp.Marsit(None, compensation=False, global_step=1.0)
        out = method.start(comm, n).aggregate(np.full(n, -2.0, np.float32))
    assert (out == -1).all()


@pytest.mark.mpi(min_size=2)
def test_auto_takes_what_the_model_finds_fastest() -> None:
    with Communicator(network=TWO_LEVEL) as comm:
        choose = fastest(comm.size, TWO_LEVEL, comm.routes.packed_piece_bytes())
        chosen = [comm.select(nbytes) for nbytes in (100, 10_000_000)]
        assert chosen == [choose(100), choose(10_000_000)]
    with Communicator(topology="ring", network=TWO_LEVEL) as comm:
        assert comm.select(100) == Ring()


def test_a_network_comes_from_a_file(tmp_path: Path) -> None:
    TWO_LEVEL.save(tmp_path / "network.json")
    with Communicator(network=tmp_path / "network.json") as comm:
        assert comm.routes.network == TWO_LEVEL


def test_a_file_that_one_rank_cannot_read_is_every_ranks_error(tmp_path: Path) -> None:
    TWO_LEVEL.save(tmp_path / "network.json")
    path = tmp_path / ("network.json" if WORLD.rank < WORLD.size - 1 else "nothing.json")
    with pytest.raises(ValueError, match=f"rank {WORLD.size - 1} of {WORLD.size}: network=.*nothing.json.*cannot be"):
        Communicator(network=path)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("network", "told"), [(None, "and none"), (LinkModel(1e-5, 2e9), "and ")])
def test_ranks_that_know_different_networks_are_told(network: LinkModel | None, told: str) -> None:
    with pytest.raises(ValueError, match=rf"ranks 0 and 1 know different networks, .* {told}"):
        Communicator(network=network if WORLD.rank else TWO_LEVEL)


def test_what_is_no_network_is_told() -> None:
    with pytest.raises(ValueError, match=r"rank 0 of .*: network='5' cannot be used"):
        Communicator(network=5)


@pytest.mark.mpi(min_size=2, max_size=4)
def test_a_file_that_one_rank_lacks_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TWO_LEVEL.save(tmp_path / "network.json")
    path = tmp_path / ("network.json" if WORLD.rank == 0 else "nothing.json")
    assert main(["advise", "--count", "1e5", "--network", str(path)]) == 2
    assert ("nothing.json: No such file" in capsys.readouterr().err) == (WORLD.rank == 0)


@pytest.mark.mpi(min_size=2, max_size=4)
def test_the_command_measures_predicts_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = "--json", str(tmp_path / "advice.json"), "--save", str(tmp_path / "network.json")
    methods = "dense", "marsit-100", "marsit", "double-squeeze", "ecq-sgd"
    assert main(["advise", "--count", "1e5", "--compute-ms", "5", "--methods", ",".join(methods[1:]), *files]) == 0
    printed, progress = capsys.readouterr()
    assert bool(printed) == bool(progress) == (WORLD.rank == 0)
    if WORLD.rank == 0:
        told = ("the network", "dense", "MPI's own", *methods[2:])
        duration, *steps = progress.splitlines()
        assert duration == "mpicomp advise: 6 measurements of 2 to 5 s each, about 21 s"
        assert [next(name for name in told if name in line) for line in steps] == list(told)
        record = json.loads((tmp_path / "advice.json").read_text())
        assert record["ranks"] == WORLD.size
        assert LinkModel.load(tmp_path / "network.json").bandwidth_bytes_s == record["network"]["bandwidth_bytes_s"]
        assert tuple(dict.fromkeys(row["method"] for row in record["rows"])) == methods
        assert record["speeds"]["ecq-sgd"]["volume"] < 0.9  # coded
        assert all(record["speeds"][name]["volume"] == pytest.approx(1, abs=0.05) for name in ("dense", "marsit"))
        assert all(0 < row["seconds"] < 60 for row in record["rows"])
        assert "\nTo copy:\n  import mpicomp.torch\n  comm, method = mpicomp.Communicator(" in printed


@pytest.mark.mpi(min_size=2, max_size=2)
def test_rows_are_printed_as_soon_as_their_method_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[list[str]] = []
    original = advise.measure_speed

    def measure(*arguments: Any) -> Speed:
        printed.append([line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != "#"])
        return original(*arguments)

    monkeypatch.setattr(advise, "measure_speed", measure)
    assert main(["advise", "--count", "1e4", "--methods", "marsit,power-sgd"]) == 0
    if WORLD.rank == 0:
        before = [sorted({*names}) for names in printed]
        assert before == [[], ["dense", "method"], ["marsit"]]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_the_quick_way_ends_in_time(
    seconds: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advise, "QUICK_S", seconds)
    file = str(tmp_path / "advice.json")
    assert main(["advise", "--count", "1e4", "--quick", "--methods", "marsit,power-sgd", "--json", file]) == 0
    if WORLD.rank == 0:
        record = json.loads(Path(file).read_text())
        left_out = [] if seconds else ["power-sgd"]
        assert record["left_out"] == left_out
        assert {row["method"] for row in record["rows"]} == {"dense", "marsit", "power-sgd"} - {*left_out}
        assert ("Not measured within the time of --quick" in capsys.readouterr().out) == bool(left_out)


@pytest.mark.mpi(min_size=2, max_size=4)
def test_a_saved_network_is_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TWO_LEVEL.save(tmp_path / "network.json")
    network = "--network", str(tmp_path / "network.json")
    assert main(["advise", "--count", "1e5", "--ranks", "16", "--methods", "marsit", *network]) == 0
    if WORLD.rank == 0:
        printed = capsys.readouterr().out
        assert "# 16 ranks" in printed
        assert "groups of 2 ranks share 80 Mbit/s" in printed


@pytest.mark.mpi(max_size=1)
def test_one_rank_alone_is_told_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--count", "1e5"]) == 2
    assert "one rank sends and merges nothing: start two or more with mpirun" in capsys.readouterr().err


def test_wrong_arguments_are_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise"]) == 2
    errors = capsys.readouterr().err
    assert ("mpicomp advise: error: give the length of the gradient" in errors) == (WORLD.rank == 0)
