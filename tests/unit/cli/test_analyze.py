"""``mpicomp analyze``: the rank that it names, and files that it cannot use."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpicomp.cli.main import main

RUN, ALL = "1f", (0, 1, 2)


def call(number: int, text: int = 0, state: str = "ended", begun: float = 1.0, communicator: int = 0) -> dict[str, Any]:
    ended = begun + 0.1 if state in ("ended", "failed") else 0.0
    times = {"begun": begun, "compared": begun if state != "begun" else 0.0, "ended": ended}
    error = {"error": "CollectiveMismatch"} if state == "failed" else {}
    return {"communicator": communicator, "call": number, "text": text, "step": -1, "state": state} | times | error


def write(folder: Path, rank: int, calls: list[dict[str, Any]], **changed: Any) -> None:
    """Write a file with communicators "RUN" of all ranks and, if calls are on it, "RUNpart" of ranks 0 and 1."""
    stack = ["/lib/collectives/execution/call.py:1 in wait"] if any(not one["ended"] for one in calls) else []
    groups = [{"key": RUN, "rank": rank, "members": list(ALL), "begun": 0}]
    if rank < 2:
        groups.append({"key": f"{RUN}part", "rank": rank, "members": [0, 1], "begun": 0})
    for one in calls:
        groups[one["communicator"]]["begun"] = max(groups[one["communicator"]]["begun"], one["call"])
    about = {"format": 1, "reason": "CollectiveTimeout: late", "rank": rank, "ranks": 3, "missing": []}
    rest = {"clock": {"monotonic": 10.0, "wall": 1e9}, "texts": ["barrier()", "allreduce(sum) of int8[3]"]}
    threads = [{"name": "MainThread", "main": True, "stack": [*stack, f"train.py:{rank} in step"]}]
    content = about | rest | {"communicators": groups, "calls": calls, "threads": threads} | changed
    (folder / f"flight-{rank}.json").write_text(json.dumps(content))


def analyze(folder: Path, capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    assert main(["analyze", str(folder), "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_late_rank_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [call(1), call(2, 1, "begun")])
    write(tmp_path, 1, [call(1)], reason="SIGTERM")
    write(tmp_path, 2, [call(1), call(2, 1, "begun")])
    found = analyze(tmp_path, capsys)
    assert found["named"] == [1]
    (one,) = found["findings"]
    assert (one["kind"], one["ranks"], one["call"], one["waiting"]) == ("late", [1], 2, [0, 2])
    assert one["stacks"] == {"1": ["train.py:1 in step"]}
    assert main(["analyze", str(tmp_path)]) == 0
    assert "rank 1 has not begun call 2 of the communicator of ranks 0-2" in capsys.readouterr().out


def test_a_deviating_call_is_named_before_its_consequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in ALL:
        write(tmp_path, rank, [call(1), call(2, int(rank == 2), "begun")])
    found = analyze(tmp_path, capsys)
    assert found["named"] == [2]
    assert found["findings"][0]["sentence"].endswith("differs: ranks 0-1: barrier(); rank 2: allreduce(sum) of int8[3]")


LAST, PART = call(4, 1, "begun", 3.0), call(1, 1, "begun", 3.0, communicator=1)
WITHIN, MESSAGE = call(4, 1, "compared", 3.0), call(0, 1, "begun", 3.0)
# Names of events after call 2, in which rank 2 differed: the last calls of each rank, None for a rank without a file,
# the ranks that are named, and the kinds of the findings.
AFTER_A_MISMATCH: dict[str, tuple[list[list[Any] | None], list[int], list[str]]] = {
    "a rank is late": ([[LAST], [], [LAST]], [1], ["late", "differed"]),
    "a rank of a part is late": ([[PART], [], []], [1], ["late", "differed"]),
    "two ranks are late": ([[LAST], [], []], [1, 2], ["late", "differed"]),
    "the rank that differed is late": ([[LAST], [LAST], []], [2], ["late", "differed"]),
    "a rank is silent within a call": ([[WITHIN], [WITHIN], [WITHIN]], [1], ["silent", "differed"]),
    "a rank has died": ([[WITHIN], None, [WITHIN]], [1], ["no file", "differed"]),
    "a rank waits for a message": ([[MESSAGE], [], []], [], ["differed"]),
    "a rank waits for a message of the late one": ([[MESSAGE], [], [LAST]], [1], ["late", "differed"]),
    "all ranks compute": ([[], [], []], [], ["differed"]),
    "another rank differs": (
        [[call(4, int(rank == 1), "failed", 3.0)] for rank in ALL], [1], ["differs", "differed"],
    ),
    "another rank differs, and is caught": (
        [[call(4, int(rank == 1), "failed", 3.0), call(5, 0, "ended", 4.0)] for rank in ALL], [], ["differed"],
    ),
    "it was not caught": ([[call(3, 0, "failed", 2.0)] for _ in ALL], [2], ["differs"]),
}  # fmt: skip


@pytest.mark.parametrize(("last", "named", "kinds"), AFTER_A_MISMATCH.values(), ids=AFTER_A_MISMATCH)
def test_no_rank_is_named_for_a_mismatch_after_which_the_program_went_on(
    last: list[list[Any] | None], named: list[int], kinds: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, calls in enumerate(last):
        if calls is not None:
            went_on = [] if kinds == ["differs"] else [call(3, begun=2.0)]
            silent = {"missing": [1]} if "silent" in kinds and rank != 1 else {}
            write(tmp_path, rank, [call(1), call(2, int(rank == 2), "failed"), *went_on, *calls], **silent)
    found = analyze(tmp_path, capsys, 0 if named else 1)
    assert (found["named"], [one["kind"] for one in found["findings"]]) == (named, kinds)
    passed = [one["sentence"] for one in found["findings"] if one["kind"] == "differed"]
    assert all("call 2 of the communicator of ranks 0-2 differed, and the ranks went on: rank" in one for one in passed)


def test_ranks_that_wait_for_another_communicator_are_not_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path, 0, [call(1), call(1, 1, "begun", communicator=1)]
    )  # rank 2 waits for rank 0, which waits for rank 1
    write(tmp_path, 1, [call(1)])
    write(tmp_path, 2, [call(1), call(2, 1, "begun")])
    assert analyze(tmp_path, capsys)["named"] == [1]


def test_a_rank_without_a_file_is_named_if_others_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, [call(1, state="compared")])
    found = analyze(tmp_path, capsys)
    assert (found["named"], found["missing_files"], found["findings"][0]["kind"]) == ([1], [1], "no file")


def test_a_rank_that_does_not_answer_is_named_within_a_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [call(1, state="compared")], missing=[1])
    write(tmp_path, 1, [call(1, state="compared")], reason="SIGTERM")
    write(tmp_path, 2, [call(1), call(2, 1, "begun")], missing=[1])
    found = analyze(tmp_path, capsys)
    assert found["named"] == [1]
    assert [one["kind"] for one in found["findings"]] == ["silent"]


def test_a_rank_that_ended_too_early_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in ALL:
        write(tmp_path, rank, [call(number) for number in range(1, 2 + (rank == 2))])
    found = analyze(tmp_path, capsys, 1)
    assert [(one["kind"], one["ranks"], one["call"]) for one in found["findings"]] == [("ahead", [2], 2)]


def test_a_job_that_runs_blames_no_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in ALL:  # rank 0 has begun its second call half a second before the others wrote their files
        write(tmp_path, rank, [call(1), call(2, 0, "begun", 9.5)][: 2 - (rank > 0)], reason="SIGUSR1")
    assert main(["analyze", str(tmp_path)]) == 1
    assert "no rank is late, and no call differs" in capsys.readouterr().out


def test_calls_between_two_ranks_have_no_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in ALL:
        write(tmp_path, rank, [call(1), call(0, rank % 2, "begun")])
    assert analyze(tmp_path, capsys, 1)["findings"] == []


def test_a_rank_that_waits_for_a_death_is_not_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, calls in enumerate(([call(1), call(2, 1, "begun")], [call(1)], [call(1, 1)])):
        group = {"key": RUN, "rank": rank % 2, "members": [0, 1] if rank < 2 else [2], "begun": len(calls)}
        write(tmp_path, rank, calls, communicators=[group], reason="SIGUSR1")
    found = analyze(tmp_path, capsys)
    assert (found["named"], found["files"], found["notes"]) == ([1], [0, 1, 2], [])
    assert [(one["kind"], one["communicator"]) for one in found["findings"]] == [("late", [0, 1])]


def test_files_of_another_run_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, [call(1, state="begun")])
    old = [{"key": "2e", "rank": 1, "members": list(ALL), "begun": 1}]
    write(tmp_path, 1, [call(1)], communicators=old, clock={"monotonic": 10.0, "wall": 1e8})
    found = analyze(tmp_path, capsys)
    assert (found["named"], found["files"]) == ([1], [0, 2])
    assert found["notes"] == ["left out: the file of rank 1, of another run"]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"format": 2}, "its format is 2, and this version reads 1"),
        ({"rank": 3}, "its rank is 3 of 3"),
        ({"texts": []}, "index out of range"),
        ({"missing": [7]}, "it names ranks that are no ranks of its job"),
        ({"calls": [call(1) | {"communicator": 5}]}, "it has no communicator 5"),
        ({"calls": [call(1) | {"begun": "x"}]}, "its 'begun' is 'x', not a number"),
        ({"clock": {}}, "it has no 'monotonic'"),
        ({"threads": [1]}, "it is 1, not an object"),
    ],
)
def test_files_that_cannot_be_read_are_left_out_with_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], problem: str
) -> None:
    write(tmp_path, 1, [call(1)])
    content = json.loads((tmp_path / "flight-1.json").read_text())
    (tmp_path / "flight-1.json").write_text(json.dumps(content | changed))
    assert main(["analyze", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mpicomp analyze: error: no rank has left a file")
    assert problem in error
    write(tmp_path, 0, [call(1)])
    assert any(problem in note for note in analyze(tmp_path, capsys, 1)["notes"])


def test_folders_without_files_and_names_of_other_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "flight-0.json")  # would block a reader
    (tmp_path / "flight-1.json").write_text('{"format": 1, "rea')
    assert main(["analyze", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "flight-0.json is no regular file" in error
    assert "flight-1.json is not JSON that can be read" in error
    assert main(["analyze", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
