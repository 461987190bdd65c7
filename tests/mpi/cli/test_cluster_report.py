"""`mpicomp bench --report` under mpirun: one report without names, within a budget that all ranks share."""

from __future__ import annotations

import getpass
import json
import platform
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from collectives import Communicator
from mpicomp.cli.cluster_report import measurement, rounds, training
from mpicomp.cli.cluster_report.measurement import measure
from mpicomp.cli.cluster_report.progress import Progress
from mpicomp.cli.cluster_report.rounds import FEWEST, MOST, Budget, timed_rounds
from mpicomp.cli.cluster_report.validation import problems
from mpicomp.cli.main import main
from tests.mpi.lanes import up_to_two_ranks

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi(min_size=2, max_size=3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "SIZES", (40_000, 80_000))
    monkeypatch.setattr(rounds, "MOST", 3)
    monkeypatch.setattr(training, "WIDTHS", (8, 8))


def quiet(comm: Communicator) -> Progress:
    return Progress("", 60, active=False)


def same_everywhere(value: object) -> bool:
    return len(set(WORLD.allgather(repr(value)))) == 1


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("small")
def test_a_report_is_valid_and_has_no_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(WORLD.bcast(str(tmp_path)))
    stem = folder / "ours"
    assert main(["bench", "--report", f"{stem}.json", "--minutes", "2"]) == 0
    out, err = capsys.readouterr()
    assert bool(out) == bool(err) == (WORLD.rank == 0)
    texts = WORLD.bcast([Path(f"{stem}{ending}").read_text() for ending in (".json", ".md")] if WORLD.rank == 0 else [])
    report = json.loads(texts[0])
    assert problems(report) == []
    assert report["ranks_per_node"] == [WORLD.size]
    assert report["training"]["skipped"] is None
    assert [entry["skipped"] for entry in report["allreduce"]] == [None, None]
    assert {"dense ring", "MPI default", "marsit", "relay"} <= {
        call["name"] for call in report["allreduce"][0]["calls"]
    }
    for text in texts:
        for name in (platform.node(), getpass.getuser(), str(Path.home()), str(folder)):
            # a user or a host may have the name of a product's part
            assert f'"{name}' not in text
            assert f"{name}/" not in text
        assert platform.node() not in text
    assert main(["report", "check", f"{stem}.json"]) == 0
    WORLD.Barrier()


@pytest.mark.usefixtures("small")
def test_each_all_reduce_sends_the_bytes_of_its_method(comm: Communicator) -> None:
    found = measure(comm, 1, quiet(comm))
    assert same_everywhere(found)
    sent = {call["name"]: call["bytes_sent_per_rank"] for call in found["allreduce"][1]["calls"]}
    dense = 2 * (comm.size - 1) / comm.size * 80_000
    assert sent["dense ring"] == pytest.approx(dense, rel=0.01)
    to_each = 5400  # a fifteenth of the vector: short ones are gathered, by every rank from every other one
    assert sent["marsit"] < to_each * (comm.size - 1)
    assert sent["relay"] < to_each * (comm.size - 1)
    assert sent["MPI default"] is None


@pytest.mark.usefixtures("small")
def test_without_time_the_first_size_alone_is_measured_and_the_others_have_the_reason(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Budget, "left_s", lambda self: -1.0)
    found = measure(comm, 1, quiet(comm))
    assert [entry["skipped"] for entry in found["allreduce"]] == [None, "time"]
    assert found["training"]["skipped"] == "time"
    assert [len(call["seconds"]) for call in found["allreduce"][0]["calls"]] == [1] * len(
        found["allreduce"][0]["calls"]
    )
    assert problems(found) == []


@pytest.mark.usefixtures("small")
def test_one_rank_without_memory_or_torch_decides_for_all(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    last = comm.rank == comm.size - 1
    monkeypatch.setattr(measurement, "free_bytes", lambda: 1e5 if last else 1e12)
    monkeypatch.setattr(training, "find_spec", lambda name: None if last else name)
    found = measure(comm, 1, quiet(comm))
    assert same_everywhere(found)
    assert [entry["skipped"] for entry in found["allreduce"]] == [None, "memory"]
    assert found["training"]["skipped"] == "no torch"
    assert problems(found) == []


def test_ranks_with_other_clocks_make_the_same_calls(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's clock stands still and the others' run ahead: by their own clocks these would stop at once."""
    budget, made = Budget(comm, 100.0), [0]
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: 1e9 * comm.rank)

    def call() -> None:
        made[0] += 1

    timed = timed_rounds({"one": call, "other": call}, comm, 1.0, budget, quiet(comm))
    assert same_everywhere(made[0])
    assert made[0] == 2 * MOST
    assert same_everywhere(timed)


@pytest.mark.parametrize(("left_s", "n_rounds"), [(50.0, FEWEST), (-1.0, 1)])
def test_rounds_end_with_their_share_of_the_time(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, left_s: float, n_rounds: int
) -> None:
    budget = Budget(comm, 100.0)
    monkeypatch.setattr(budget, "left_s", lambda: left_s)
    timed = timed_rounds({"nap": lambda: time.sleep(0.01)}, comm, 0.001, budget, quiet(comm))
    assert [len(times) for times in timed.values()] == [n_rounds]


def test_the_slowest_algorithms_of_mpi_go_first_if_time_is_short() -> None:
    expected = {"MPI ring": 2.0, "MPI other": 3.0, "dense": 4.0}
    fitting = measurement._fitting
    assert fitting(expected, {"MPI ring", "MPI other"}, 9) == expected
    assert fitting(expected, {"MPI ring", "MPI other"}, 7) == {"MPI ring": 2.0, "dense": 4.0}
    assert fitting(expected, {"MPI ring", "MPI other"}, 1) == {
        "MPI ring": 2.0,
        "dense": 4.0,
    }  # a fair comparison needs one


@up_to_two_ranks
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--minutes", "0"], "--minutes 0: give a number of at least 0.05"),
        (["--minutes", "long"], "--minutes long: give a number"),
        (["--timeout", "-1"], "--timeout -1: give a positive number of seconds"),
        (["--count", "1e3", "--no-check"], "and has no --count, --check: leave it out"),
    ],
)
def test_errors_have_the_cure(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--report", "ours", *arguments]) == 2
    assert (told in capsys.readouterr().err) == (WORLD.rank == 0)


def test_a_folder_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--report", str(tmp_path / "none" / "ours")]) == 2
    error = capsys.readouterr().err
    assert ("none/ours.json: No such file" in error) == ("bench --report: error: " in error) == (WORLD.rank == 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [*training.STEPS])
@pytest.mark.parametrize("at", ["making", 0, 2])
def test_an_error_in_a_training_step_is_written_into_the_report(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, name: str, at: str | int
) -> None:
    """It comes on the last rank alone; the others are in the exchange of that step, or of the next one."""
    step, text = training._step, "no room on device 0 of /dev/gpu or node17.example.org, asked by shy0"
    failing = comm.rank == comm.size - 1
    # another rank's, and of one that has no name
    monkeypatch.setattr(training, "platform", SimpleNamespace(node=lambda: "" if failing else f"shy{comm.rank}"))

    def broken(algorithm: Any, own: Communicator) -> Any:
        made, count = step(algorithm, own), [0]
        mine = failing and training.STEPS[name] is algorithm
        if mine and at == "making":
            raise RuntimeError(text)

        def call() -> None:
            if mine and count[0] == at:
                raise RuntimeError(text)
            count[0] += 1
            made()

        return call

    monkeypatch.setattr(training, "_step", broken)
    monkeypatch.setattr(training, "CALLS_EXPECTED", 0)  # the time that is expected has no part in this
    found = measure(comm, 1, quiet(comm))
    assert same_everywhere(found)
    assert found["training"]["skipped"] == "error: RuntimeError: no room on device 0 of ... or ... asked by ..."
    assert found["training"]["steps"] == []
    assert [entry["skipped"] for entry in found["allreduce"]] == [None, None]
    assert problems(found) == []


@pytest.mark.usefixtures("small")
def test_a_wrong_result_leaves_no_report(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> str:
        return "element 3 is 0"

    monkeypatch.setattr(measurement, "checked_call", wrong)
    with pytest.raises(
        RuntimeError, match=f"rank {comm.rank} .*dense ring gives a wrong result: element 3 is 0; report"
    ):
        measure(comm, 1, quiet(comm))


def test_all_ranks_leave_out_the_same_algorithms_where_none_is_slower(comm: Communicator) -> None:
    names = [f"algorithm {number}" for number in range(20)]
    kept = [*measurement._fitting(dict.fromkeys(names, 1.0), set(names), 5.0)]
    assert len(kept) == 5
    assert comm.allgather_object(kept) == [kept] * comm.size
