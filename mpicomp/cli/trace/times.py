"""What each rank of a job spent its time on, from the traces of all."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

COMPUTING = ("encode", "prepare", "merge", "decode")
COLUMNS = ("calls", "outside", "encode", "merge", "decode", "wait", "check", "other", "wire", "flying", "exposed")

Interval = tuple[float, float]
Message = tuple[int, int, int, int]  # program, sender, receiver, number among the messages from one to the other


@dataclass
class RankTrace:
    """What one rank did; intervals are in microseconds."""

    rank: int
    # by kind of span, without what lies within other spans; "in calls" is all of the calls, and "outside" what lies in
    # none: waits for calls that were begun, work on them meanwhile, and checks
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    computing: list[Interval] = field(default_factory=list)
    flights: list[Interval] = field(default_factory=list)  # of calls in the background
    # when a message was under way, as this rank saw it
    sent: dict[Message, Interval] = field(default_factory=dict)
    received: dict[Message, Interval] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: dict[str, Any], last: int = 0) -> RankTrace:
        """Take in a file: from the beginning of the newest `last` calls to the end of the newest, or all."""
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

    def _add_up(self, spans: list[tuple[int, int, str]], beside: bool) -> None:
        """Take in the spans of one thread; `beside`: another thread makes the calls."""
        outer: list[tuple[int, str]] = []  # ends and kinds of the spans that a span lies in
        for start, minus, kind in spans:
            while outer and outer[-1][0] <= start:
                outer.pop()
            self.seconds[kind] -= minus * 1e-9
            if outer:
                self.seconds[outer[-1][1]] += minus * 1e-9
            elif kind != "exposed" and not beside:
                self.seconds["in calls" if kind == "call" else "outside"] -= minus * 1e-9
            outer.append((start - minus, kind))
            if kind in COMPUTING:
                self.computing.append((start / 1e3, (start - minus) / 1e3))


def _window(events: list[dict[str, Any]], last: int) -> Interval:
    """When the newest `last` calls began, and when the newest ended; everything, if all count or there is none."""
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
        cells = [spent["in calls"], spent["outside"], spent["encode"], merge]
        cells += [*(spent[kind] for kind in ("decode", "wait", "check", "call")), busy * 1e-6]
        cells += [length(union(rank.flights)) * 1e-6, spent["exposed"]]
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
