"""``mpicomp trace`` joins the traces of a job's ranks into one for ui.perfetto.dev, and tells what time was spent on.

``mpicomp trace DIR --out all.json``

It needs no MPI. The exit status is 0, or 2 where there are no traces that can be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["add_arguments", "run"]

USAGE_ERROR = 2
COMPUTING = ("encode", "prepare", "merge", "decode")
COLUMNS = ("calls", "encode", "merge", "decode", "wait", "check", "other", "wire")

Interval = tuple[float, float]
Message = tuple[int, int, int, int]  # program, sender, receiver, number among the messages from one to the other


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp trace`` to `parser`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the ranks have left their traces")
    parser.add_argument("--last", type=int, default=0, metavar="N", help="tell of the newest N calls only; 0: of all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write one trace of all ranks")


def run(args: argparse.Namespace) -> int:
    """Join, print the table, and return the exit status."""
    try:
        traces, notes = read(args.folder)
        if args.out is not None:
            join(traces, args.out)
    except (OSError, ValueError) as error:
        print(f"mpicomp trace: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(table([RankTrace.of(trace, args.last) for trace in traces]))
    print("\n".join(f"# {note}" for note in notes + remarks(traces)))
    return 0


def read(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The newest run's traces, by rank, and what is to be said of the other files.

    Raises
    ------
    OSError, ValueError
        There is none, or a file is not a trace.
    """
    found, notes = [], []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            trace = json.loads(path.read_text())
            found.append((trace["otherData"]["run"], trace["otherData"]["rank"], path.name, trace))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a trace that a rank has written ({error}); remove it") from error
    newest = max((run for run, *_ in found), default=0.0)
    if not newest:
        raise ValueError(f"no rank has left a trace in {folder}; name the folder that trace= or --trace named")
    for run, rank, name, _ in found:
        if not run:
            notes.append(f"{name}: rank {rank} ended before it could write what it did")
        elif run != newest:
            notes.append(f"{name}: left out, as it is of an earlier run")
    return [trace for run, *_, trace in sorted(found, key=lambda each: each[1]) if run == newest], notes


def remarks(traces: list[dict[str, Any]]) -> list[str]:
    """What a reader of the table must know."""
    abouts = [trace["otherData"] for trace in traces]
    said = [
        "seconds; hidden: the part of the wire's time in which the rank computed",
        "wire, and what is hidden of it, are upper bounds: a message counts as under way until its receiver looks",
    ]
    missing = sorted(set(range(abouts[0]["ranks"])) - {about["rank"] for about in abouts})
    if missing:
        said.append(f"there is no trace of ranks {', '.join(map(str, missing))}")
    cut = [about["rank"] for about in abouts if not about["complete"]]
    if cut:
        said.append(f"ranks {', '.join(map(str, cut))} have kept only their newest events")
    off = max(reading["round_trip"] for about in abouts for reading in about["clock"]) / 2
    said.append(f"clocks agree to {1e6 * off:.1f} us or better")
    return said


def join(traces: list[dict[str, Any]], path: Path) -> None:
    """Write all ranks' events into one file: their times are aligned already."""
    about = {"ranks": [trace["otherData"] for trace in traces]}
    with path.open("w") as file:
        file.write(f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)},\n"traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for trace in traces for event in trace["traceEvents"]))
        file.write("\n]}\n")


@dataclass
class RankTrace:
    """What one rank did.

    Attributes
    ----------
    seconds : dict
        By kind of span, without what lies within other spans; "in calls" is everything.
    computing : list of (start, end)
        Microseconds.
    sent, received : dict
        When a message was under way, as this rank saw it: start and end in microseconds.
    """

    rank: int
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    computing: list[Interval] = field(default_factory=list)
    sent: dict[Message, Interval] = field(default_factory=dict)
    received: dict[Message, Interval] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: dict[str, Any], last: int = 0) -> RankTrace:
        """Take in a file: the newest `last` calls, or all."""
        made, events = cls(trace["otherData"]["rank"]), trace["traceEvents"]
        calls = sorted(event["ts"] for event in events if event["ph"] == "X" and event["cat"] == "call")
        since = calls[-min(last, len(calls))] if last > 0 and calls else -math.inf
        begun: dict[str, tuple[Message, float]] = {}
        spans = []
        for event in events:
            if event.get("ts", -math.inf) < since:
                continue
            if event["ph"] == "X":
                start = _nanoseconds(event["ts"])
                spans.append((start, start - _nanoseconds(event["ts"] + event["dur"]), event["cat"]))
            elif event["ph"] == "b":
                args, ends = event["args"], (made.rank, event["args"]["peer"])
                sender, receiver = ends if event["cat"] == "send" else ends[::-1]
                begun[event["id"]] = (args["call"], sender, receiver, args["message"]), event["ts"]
            elif event["ph"] == "e" and event["id"] in begun:
                message, began = begun.pop(event["id"])
                (made.sent if event["cat"] == "send" else made.received)[message] = began, event["ts"]
        made._add_up(sorted(spans))
        return made

    def _add_up(self, spans: list[tuple[int, int, str]]) -> None:
        outer: list[tuple[int, str]] = []  # ends and kinds of the spans that a span lies in
        for start, minus, kind in spans:
            while outer and outer[-1][0] <= start:
                outer.pop()
            self.seconds[kind] -= minus * 1e-9
            if outer:
                self.seconds[outer[-1][1]] += minus * 1e-9
            else:
                self.seconds["in calls"] -= minus * 1e-9
            outer.append((start - minus, kind))
            if kind in COMPUTING:
                self.computing.append((start / 1e3, (start - minus) / 1e3))


def _nanoseconds(microseconds: float) -> int:
    """A time of the file as it was before it was divided: spans that meet must not overlap by a rounding error."""
    return round(1e3 * microseconds)


def table(ranks: list[RankTrace]) -> str:
    """One line per rank."""
    sent = {message: times for rank in ranks for message, times in rank.sent.items()}
    received = {message: times for rank in ranks for message, times in rank.received.items()}
    lines = ["".join([f"{'rank':>4}", *(f"{name:>11}" for name in COLUMNS), f"{'hidden':>8}"])]
    for rank in ranks:
        # a message is under way from when its sender starts it until its receiver finds it
        under_way = [(start, received.get(message, (start, end))[1]) for message, (start, end) in rank.sent.items()]
        under_way += [(sent.get(message, (start, end))[0], end) for message, (start, end) in rank.received.items()]
        wire = union(under_way)
        busy, hidden = length(wire), length(overlap(wire, union(rank.computing)))
        spent = rank.seconds
        merge = spent["prepare"] + spent["merge"]
        cells = [spent["in calls"], spent["encode"], merge, spent["decode"], spent["wait"], spent["check"]]
        cells += [spent["call"], busy * 1e-6]
        share = f"{hidden / busy:.0%}" if busy else "-"
        lines.append("".join([f"{rank.rank:>4}", *(f"{cell:>11.6f}" for cell in cells), f"{share:>8}"]))
    return "\n".join(lines)


def union(intervals: list[Interval]) -> list[Interval]:
    """The times that are in any of the intervals, in order and apart."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif start < end:
            joined.append((start, end))
    return joined


def overlap(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """The times that are in both of two unions."""
    both, at = [], 0
    for start, end in first:
        while at < len(second) and second[at][1] <= start:
            at += 1
        here = at
        while here < len(second) and second[here][0] < end:
            both.append((max(start, second[here][0]), min(end, second[here][1])))
            here += 1
    return both


def length(intervals: list[Interval]) -> float:
    """How long they are together, being apart."""
    return sum(end - start for start, end in intervals)
