"""``mpicomp trace`` joins the traces of a job's ranks for ui.perfetto.dev, and prints where their time went.

``mpicomp trace DIR --out all.json``

It needs no MPI. The exit status is 0, or 2 where the folder has no traces that can be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from collectives.json_file import fields, read_json
from collectives.quoting import one_line, shown
from mpicomp.cli.arguments import integer

USAGE_ERROR = 2
FILES = "rank-*.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp trace`` to `parser`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder in which the ranks have left their traces")
    parser.add_argument("--last", default="0", metavar="N", help="count only the newest N calls; 0 counts all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the traces of all ranks into one file")


def run(args: argparse.Namespace) -> int:
    """Join the traces, print the table, and return the exit status."""
    try:
        last = integer("--last", args.last, 0)
        traces, notes = read(args.folder)
        if args.out is not None:
            if (out := args.out.resolve()).match(FILES) and out.parent == args.folder.resolve():
                raise ValueError(f"--out {args.out}: files of such names are the ranks' own; name another file")
            join(traces, args.out)
    except (OSError, ValueError) as error:
        print(f"mpicomp trace: error: {one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    print(table([RankTrace.of(trace, last) for trace in traces]))
    print("\n".join(f"# {note}" for note in notes + remarks(traces)))
    return 0


def join(traces: list[Trace], path: Path) -> None:
    """Write all ranks' events into one file; their times are aligned already."""
    about = {"ranks": [trace["otherData"] for trace in traces]}
    try:
        with path.open("w") as file:
            file.write(f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)},\n"traceEvents": [\n')
            file.write(",\n".join(json.dumps(event) for trace in traces for event in trace["traceEvents"]))
            file.write("\n]}\n")
    except OSError as error:
        raise OSError(f"--out {path}: {error.strerror}; make room there, or name another file") from error


# Files ---------------------------------------------------------------------------------------------------------------


MOST_BYTES = 1 << 27  # a rank keeps 131072 events, which fill 55 MB
MOST_RANKS = 1 << 20
_LATEST_US = 1e15  # thirty years: nanoseconds until then are integers of 64 bits
_ABOUT: dict[str, type] = {"rank": int, "ranks": int, "run": float, "complete": bool, "clock": list}

Event: TypeAlias = dict[str, Any]
Trace: TypeAlias = dict[str, Any]


def read(folder: Path) -> tuple[list[Trace], list[str]]:
    """Return the newest run's traces in rank order, and notes about files left out; ValueError without traces."""
    traces = {path: _trace(path) for path in sorted(folder.glob(FILES))}
    abouts = {path: trace["otherData"] for path, trace in traces.items()}
    newest = max((about["run"] for about in abouts.values()), default=0)
    if not newest:
        raise ValueError(
            f"no rank has left a trace in {one_line(folder)}; name the folder that trace= or --trace named"
        )
    notes = []
    for path, about in abouts.items():
        if not about["run"]:
            notes.append(f"{path.name}: rank {about['rank']} ended before it could write its trace")
        elif about["run"] != newest:
            notes.append(f"{path.name}: left out, as it is of an earlier run")
    found = [trace for trace in traces.values() if trace["otherData"]["run"] == newest]
    return sorted(found, key=lambda trace: int(trace["otherData"]["rank"])), notes


def remarks(traces: list[Trace]) -> list[str]:
    """Return sentences that prevent misreading of the table."""
    abouts = [trace["otherData"] for trace in traces]
    found = [
        "times are in seconds; hidden: the part of the wire's time in which the rank computed",
        "calls and outside, together, are encode, merge, decode, wait, check, local and other, together",
        "wire and hidden are upper bounds: a message counts as under way until its receiver looks",
    ]
    missing = sorted(set(range(max(about["ranks"] for about in abouts))) - {about["rank"] for about in abouts})
    if missing:
        found.append(f"the traces of ranks {_list_ranks(missing)} are missing")
    cut = [about["rank"] for about in abouts if not about["complete"]]
    if cut:
        found.append(f"the traces of ranks {_list_ranks(cut)} have only the newest events")
    if links := sorted({one_line(about["link"]) for about in abouts if about.get("link")}):  # not in older traces
        found.append(f"links were emulated: {', '.join(links)}")
    off = max((reading["round_trip"] for about in abouts for reading in about["clock"]), default=0.0) / 2
    found.append(f"clocks agree to {1e6 * off:.1f} us or better")
    return found


def _list_ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 20 else f"{', '.join(map(str, ranks[:20]))}, ..."


def _trace(path: Path) -> Trace:
    cure = "remove it, or let the job write its trace again"
    trace = read_json(path, cure, most_bytes=MOST_BYTES)
    try:
        about = fields(fields(trace, otherData=dict, traceEvents=list)["otherData"], **_ABOUT)
        if path.name != f"rank-{about['rank']}.json" or not about["rank"] < about["ranks"] <= MOST_RANKS:
            raise ValueError(f"its rank is {about['rank']} of {about['ranks']}")
        _require_times(about, "run")
        for reading in about["clock"]:
            _require_times(fields(reading, round_trip=float), "round_trip")
        for event in trace["traceEvents"]:
            _require_event(event)
    except ValueError as error:
        raise ValueError(
            f"{one_line(path)} is not a trace that a rank has written ({one_line(error)}); {cure}"
        ) from error
    return fields(trace)


def _require_event(event: Event) -> None:
    """Raise unless an event of this kind has the fields that the table needs."""
    match fields(event, ph=str)["ph"]:
        case "X":
            _require_times(fields(event, ts=float, dur=float, cat=str), "ts", "dur")
        case "b" if event.get("cat") == "flight":
            _require_times(fields(event, ts=float, id=str), "ts")
        case "b":
            _require_times(fields(event, ts=float, id=str, cat=str, args=dict), "ts")
            fields(event["args"], call=int, message=int, peer=int)
        case "e":
            _require_times(fields(event, ts=float, id=str, cat=str), "ts")
        case _ if "ts" in event:
            _require_times(fields(event, ts=float), "ts")


def _require_times(found: Event, *keys: str) -> None:
    for key in keys:
        if not 0 <= abs(found[key]) <= _LATEST_US:
            raise ValueError(f"its {key!r} is {shown(found[key])}, which is no time")


# Times ---------------------------------------------------------------------------------------------------------------


COMPUTING = ("encode", "prepare", "merge", "decode")
COLUMNS = (
    *("calls", "outside", "encode", "merge", "decode", "wait", "check", "local", "other"),
    *("wire", "flying", "exposed"),
)

Interval = tuple[float, float]
Message = tuple[int, int, int, int]  # program, sender, receiver, number among the messages from one to the other


@dataclass
class RankTrace:
    """Activities of one rank; intervals are in microseconds."""

    rank: int
    # by kind of span, without the spans inside it. "in calls" is all time in calls; "outside" is time of spans in no
    # call: waits for calls that were begun, work on them meanwhile, and checks
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    computing: list[Interval] = field(default_factory=list)
    flights: list[Interval] = field(default_factory=list)  # of calls in the background
    # when a message was under way, as this rank saw it
    sent: dict[Message, Interval] = field(default_factory=dict)
    received: dict[Message, Interval] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, last: int = 0) -> RankTrace:
        """Read a trace, from the beginning of the newest `last` calls to the end of the newest, or all of it for 0."""
        made, events = cls(trace["otherData"]["rank"]), trace["traceEvents"]
        since, until = _window(events, last)
        begun: dict[str, tuple[Message, float]] = {}
        flying: dict[str, float] = {}
        spans: dict[str, list[tuple[int, int, str]]] = {}  # by thread
        workers: set[str] = set()
        for event in events:
            if event["ph"] != "e" and not since <= event.get("ts", -math.inf) < until:
                continue
            if event["ph"] == "X":
                start = _nanoseconds(event["ts"])
                end = _nanoseconds(event["ts"] + event["dur"])
                thread = str(event.get("tid"))
                spans.setdefault(thread, []).append((start, start - end, event["cat"]))
                args = event.get("args")
                if isinstance(args, dict) and "worker" in args:
                    workers.add(thread)
            elif event["ph"] == "b" and event["cat"] == "flight":
                flying[event["id"]] = event["ts"]
            elif event["ph"] == "b":
                args, ends = event["args"], (made.rank, event["args"]["peer"])
                sender, receiver = ends if event["cat"] == "send" else ends[::-1]
                begun[event["id"]] = (args["call"], sender, receiver, args["message"]), event["ts"]
            elif event["ph"] == "e" and event["id"] in flying:
                made.flights.append((flying.pop(event["id"]), event["ts"]))
            elif event["ph"] == "e" and event["id"] in begun:
                message, began = begun.pop(event["id"])
                (made.sent if event["cat"] == "send" else made.received)[message] = began, event["ts"]
        for thread, mine in spans.items():
            made._add_up(sorted(mine), thread in workers)
        return made

    def _add_up(self, spans: list[tuple[int, int, str]], is_worker: bool) -> None:
        """Add the spans of one thread. A worker's calls are made by another thread."""
        outer: list[tuple[int, str]] = []  # ends and kinds of the spans that a span lies in
        for start, minus, kind in spans:
            while outer and outer[-1][0] <= start:
                outer.pop()
            self.seconds[kind] -= minus * 1e-9
            if outer:
                self.seconds[outer[-1][1]] += minus * 1e-9
            elif kind != "exposed" and not is_worker:
                self.seconds["in calls" if kind == "call" else "outside"] -= minus * 1e-9
            outer.append((start - minus, kind))
            if kind in COMPUTING:
                self.computing.append((start / 1e3, (start - minus) / 1e3))


def _window(events: list[Event], last: int) -> Interval:
    """Return the beginning of the newest `last` calls and the end of the newest; all time without calls or for 0."""
    calls = [(event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["cat"] == "call"]
    flights = [event for event in events if event.get("cat") == "flight"]
    landed = {event["id"]: event["ts"] for event in flights if event["ph"] == "e"}
    calls += [(one["ts"], landed[one["id"]] - one["ts"]) for one in flights if one["ph"] == "b" and one["id"] in landed]
    calls.sort()
    if last <= 0 or not calls:
        return -math.inf, math.inf
    newest = calls[-last:]
    return newest[0][0], max(start + duration for start, duration in newest)


def _nanoseconds(microseconds: float) -> int:
    """Return the integer nanoseconds from which the file's time was computed: rounding must not let spans overlap."""
    return round(1e3 * microseconds)


def table(ranks: list[RankTrace]) -> str:
    """Return the table, with one line per rank."""
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
        cells = [spent["in calls"], spent["outside"], spent["encode"], merge]
        cells += [*(spent[kind] for kind in ("decode", "wait", "check", "local")), spent["call"] + spent["node"]]
        cells += [busy * 1e-6, length(union(rank.flights)) * 1e-6, spent["exposed"]]
        share = f"{hidden / busy:.0%}" if busy else "-"
        lines.append("".join([f"{rank.rank:>4}", *(f"{cell:>11.6f}" for cell in cells), f"{share:>8}"]))
    return "\n".join(lines)


def union(intervals: list[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif start < end:
            joined.append((start, end))
    return joined


def overlap(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return the intersection of two unions."""
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
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
