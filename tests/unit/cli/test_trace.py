"""``mpicomp trace``: its table of traces, and errors for files that it cannot use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from collectives.trace.clocks import Reading, offset_at
from collectives.trace.recorder import Trace, flush
from mpicomp.cli.main import main
from mpicomp.cli.trace import RankTrace, overlap, read, table, union
from tests.mutations import mutants


def span(kind: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": kind, "cat": kind, "pid": 0, "tid": 0, "ts": start, "dur": end - start, "args": {}}


def message(kind: str, peer: int, start: float, end: float) -> list[dict[str, Any]]:
    where = {"cat": kind, "id": f"{kind}{peer}", "name": "", "pid": 0, "tid": 0}
    args = {"call": 1, "message": 0, "peer": peer}
    return [{"ph": "b", **where, "ts": start, "args": args}, {"ph": "e", **where, "ts": end}]


def trace(rank: int, events: list[dict[str, Any]], run: float = 7.0, ranks: int = 2) -> dict[str, Any]:
    clock = [{"at": 0.0, "offset": 0.0, "round_trip": 4e-6}]
    about = {"rank": rank, "ranks": ranks, "run": run, "host": "h", "complete": True, "clock": clock}
    return {"otherData": about, "traceEvents": events}


# Rank 0 encodes for 2 s and sends from 2 to 9 s, merging for 3 s of these; rank 1 posts its receive at 0 s.
SENDER = [
    span("call", 0, 10e6),
    span("encode", 0, 2e6),
    *message("send", 1, 2e6, 2.1e6),
    span("merge", 3e6, 6e6),
    span("wait", 6e6, 9e6),
]
RECEIVER = [span("call", 0, 10e6), span("wait", 1e6, 9e6), *message("receive", 0, 0, 9e6)]


def test_a_message_is_under_way_from_its_sender_to_its_receiver() -> None:
    lines = table([RankTrace.of(trace(0, SENDER)), RankTrace.of(trace(1, RECEIVER))]).splitlines()
    names = lines[0].split()
    sender, receiver = (dict(zip(names, line.split(), strict=True)) for line in lines[1:])
    expected = {"calls": 10, "outside": 0, "encode": 2, "merge": 3, "decode": 0, "wait": 3, "check": 0, "other": 2}
    expected["wire"] = 7
    assert {name: float(sender[name]) for name in expected} == expected
    assert (sender["hidden"], receiver["hidden"], receiver["wire"]) == ("43%", "0%", "7.000000")
    # of the receiver's file alone, only when it posted the receive is known
    assert float(table([RankTrace.of(trace(1, RECEIVER))]).splitlines()[1].split()[10]) == 9


def test_phases_of_nodes_add_up_to_the_call() -> None:
    events = [
        span("call", 0, 10e6),
        *(span("local", 1e6, 4e6), span("wait", 2e6, 3e6)),
        *(span("node", 4e6, 8e6), span("encode", 5e6, 6e6)),
        span("local", 8e6, 9e6),
    ]
    names, cells = (line.split() for line in table([RankTrace.of(trace(0, events))]).splitlines())
    found = dict(zip(names, cells, strict=True))
    expected = {"calls": 10, "local": 3, "wait": 1, "encode": 1, "other": 5}
    assert {name: float(found[name]) for name in expected} == expected


def test_background_calls_count_and_waits_of_the_caller_count_separately() -> None:
    flights = [
        {"ph": phase, "cat": "flight", "id": name, "ts": at * 1e6}
        for name, *ends in (("a", 0, 3), ("b", 2, 6), ("c", 8, 9))
        for phase, at in zip("be", ends, strict=True)
    ]
    events = [*flights, span("encode", 1e6, 2e6) | {"tid": 1}, span("exposed", 1.5e6, 5e6)]
    made = RankTrace.of(trace(0, events))
    assert dict(made.seconds) == pytest.approx({"encode": 1.0, "outside": 1.0, "exposed": 3.5})
    names, cells = (line.split() for line in table([made]).splitlines())
    assert float(dict(zip(names, cells, strict=True))["flying"]) == 7
    newest = RankTrace.of(trace(0, events), last=1)
    assert newest.flights == [(8e6, 9e6)]


def test_the_newest_calls_alone() -> None:
    events = [*SENDER, span("call", 20e6, 21e6), span("decode", 20e6, 20.5e6)]
    made = RankTrace.of(trace(0, events), last=1)
    assert dict(made.seconds) == pytest.approx({"call": 0.5, "in calls": 1.0, "decode": 0.5})
    assert not made.sent


def test_events_after_the_newest_call_do_not_belong_to_it() -> None:
    late = [span("wait", 22e6, 25e6), span("check", 26e6, 27e6), *message("send", 3, 22e6, 23e6)]
    events = [*SENDER, span("call", 20e6, 21e6), *message("send", 2, 20e6, 22e6), *late]
    made = RankTrace.of(trace(0, events), last=1)
    assert dict(made.seconds) == pytest.approx({"call": 1.0, "in calls": 1.0})
    assert [receiver for _, _, receiver, _ in made.sent] == [2]


def test_waits_between_calls_are_no_calls() -> None:
    events = [span("call", 0, 1e6), span("wait", 2e6, 5e6), span("encode", 3e6, 4e6), span("call", 6e6, 7e6)]
    made = RankTrace.of(trace(0, events), last=2)
    expected = {"call": 2.0, "in calls": 2.0, "outside": 3.0, "wait": 2.0, "encode": 1.0}
    assert dict(made.seconds) == pytest.approx(expected)


def test_spans_that_meet_do_not_lie_within_each_other() -> None:
    events = [span("merge", 0.1, 0.3), {**span("decode", 0, 0), "ts": 0.3, "dur": 5000.0}]
    made = RankTrace.of(trace(0, events))
    assert made.seconds["merge"] == pytest.approx(2e-7)
    assert made.seconds["decode"] == pytest.approx(5e-3)


def test_unions_and_overlaps() -> None:
    joined = union([(5, 6), (0, 2), (1, 3), (3, 4), (8, 8)])
    assert joined == [(0, 4), (5, 6)]
    assert overlap(joined, [(1, 2), (3, 5.5), (7, 9)]) == [(1, 2), (3, 4), (5, 5.5)]


def test_files_are_joined_and_remarks_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, events, run in ((0, SENDER, 7.0), (1, RECEIVER, 7.0), (2, RECEIVER, 3.0), (3, [], 0.0)):
        written = trace(rank, events, run, ranks=4)
        written["otherData"]["link"] = "100 Mbit/s"
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(written))
    out = tmp_path / "all.json"
    assert main(["trace", str(tmp_path), "--out", str(out)]) == 0
    joined = json.loads(out.read_text())
    assert joined["traceEvents"] == SENDER + RECEIVER
    assert [about["rank"] for about in joined["otherData"]["ranks"]] == [0, 1]
    printed = capsys.readouterr().out
    for remark in (
        "rank-2.json: left out, as it is of an earlier run",
        "rank-3.json: rank 3 ended before it could write its trace",
        "the traces of ranks 2, 3 are missing",
        "clocks agree to 2.0 us or better",
        "links were emulated: 100 Mbit/s",
        "wire and hidden are upper bounds",
    ):
        assert remark in printed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "no rank has left a trace in"),
        ("[]", r"is not a trace that a rank has written (it is [], not an object)"),
        ('{"otherData": ', "is not JSON that can be read (Expecting value"),
        ("[" * 100_000, "nested deeper than 100 levels"),
        (json.dumps(trace(1, [])), "(its rank is 1 of 2)"),
        (json.dumps(trace(0, [], ranks=0)), "(its rank is 0 of 0)"),
        (json.dumps(trace(0, [], ranks=10**17)), "(its rank is 0 of 100000000000000000)"),
        (json.dumps(trace(0, [], run=True)), "(its 'run' is True, not a number)"),
        (json.dumps(trace(0, [{"ph": "X", "ts": 1, "dur": 1}])), "(it has no 'cat')"),
        (json.dumps(trace(0, [{"ph": "X", "ts": 1e300, "dur": 1, "cat": "call"}])), "(its 'ts' is 1e+300, which is no"),
        (json.dumps(trace(0, [{"ph": "M", "ts": "late"}])), "(its 'ts' is 'late', not a number)"),
        (json.dumps(trace(0, [{"ph": "b", "ts": 1, "id": [], "cat": "send"}])), "(its 'id' is [], not a text)"),
    ],
)
def test_a_file_that_is_no_trace_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, problem: str
) -> None:
    if text is not None:
        (tmp_path / "rank-0.json").write_text(text)
    assert main(["trace", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mpicomp trace: error: ")
    assert problem in error
    assert error.count("\n") == 1


def test_a_full_disk_is_named_with_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.json").write_text(json.dumps(trace(0, [], ranks=1)))
    assert main(["trace", str(tmp_path), "--out", "/dev/full"]) == 2
    told = "--out /dev/full: No space left on device; make room there, or name another file"
    assert capsys.readouterr().err == f"mpicomp trace: error: {told}\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--last", "-5"], "--last -5: give a whole number of at least 0"),
        (["--last", "x"], "--last x: give a whole number of at least 0"),
        (["--out", "{folder}/rank-0.json"], "files of such names are the ranks' own; name another file"),
        (["--out", "{folder}/rank-all.json"], "files of such names are the ranks' own; name another file"),
    ],
)
def test_options_that_cannot_be_used_leave_the_traces_as_they_are(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(trace(0, SENDER, ranks=1)))
    before = path.read_text()
    assert main(["trace", str(tmp_path), *(one.format(folder=tmp_path) for one in options)]) == 2
    assert told in capsys.readouterr().err
    assert [(one, one.read_text()) for one in tmp_path.iterdir()] == [(path, before)]


def test_any_content_of_files_gives_a_table_or_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statuses = []
    good = trace(0, [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}, *SENDER])
    for text in mutants(good, 700):
        (tmp_path / "rank-0.json").write_text(text)
        statuses.append(main(["trace", str(tmp_path), "--out", str(tmp_path / "all.json")]))
        told = capsys.readouterr()
        if statuses[-1]:
            assert told.err.startswith("mpicomp trace: error: ")
            assert told.err.count("\n") == 1
        else:
            assert len(told.out.splitlines()) >= 4
    assert set(statuses) == {0, 2}


def test_offsets_change_evenly_between_two_readings() -> None:
    first, last = Reading(10.0, 1.0, 1e-6), Reading(20.0, 2.0, 1e-6)
    assert [offset_at([first, last], at) for at in (0, 10, 15, 20, 30)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    assert offset_at([first], 15) == 1.0


def test_a_span_that_does_not_end_and_arguments_of_any_kind_are_written(tmp_path: Path) -> None:
    made = Trace(tmp_path / "new" / "folder", 0, 1)
    made.begin_wait("for ever")
    with made.span("call", "over", given=Path("x")):
        pass
    made.run = 1.0
    flush()
    (written,), _ = read(tmp_path / "new" / "folder")
    begun, over = (event for event in written["traceEvents"] if event["ph"] == "X")
    assert (begun["args"], over["args"]) == ({"finished": False}, {"given": "x"})
    assert begun["dur"] >= 0


def test_a_file_is_written_once_and_a_later_trace_of_the_folder_left_alone(tmp_path: Path) -> None:
    made = Trace(tmp_path, 0, 1)
    with pytest.raises(ValueError, match="another communicator"):
        Trace(tmp_path, 0, 1)
    made.write()
    made.path.unlink()
    made.write()
    assert not made.path.exists()
    later = Trace(tmp_path, 0, 1)
    later.run = 1.0
    made.write()
    later.write()
    assert read(tmp_path)[0][0]["otherData"]["run"] == 1.0
