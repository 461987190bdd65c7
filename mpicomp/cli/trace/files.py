"""The traces that ranks have left in a folder, each of which is checked before any is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from collectives.json_file import fields, read_json
from collectives.quoting import one_line, shown

MOST_BYTES = 1 << 27  # a rank keeps 131072 events, which fill 55 MB
MOST_RANKS = 1 << 20
_LATEST_US = 1e15  # thirty years: nanoseconds until then are integers of 64 bits
_ABOUT: dict[str, type] = {"rank": int, "ranks": int, "run": float, "complete": bool, "clock": list}

Trace = dict[str, Any]


def read(folder: Path) -> tuple[list[Trace], list[str]]:
    """The newest run's traces in the order of ranks, and a note about each file that was left out.

    Raises
    ------
    OSError, ValueError
        The folder has no trace, or a file in it is no trace; one line with the file and the cure.
    """
    traces = {path: _trace(path) for path in sorted(folder.glob("rank-*.json"))}
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
    """Return the sentences without which the table could be misread."""
    abouts = [trace["otherData"] for trace in traces]
    said = [
        "times are in seconds; hidden: the part of the wire's time in which the rank computed",
        "calls and outside, together, are encode, merge, decode, wait, check and other, together",
        "wire and hidden are upper bounds: a message counts as under way until its receiver looks",
    ]
    missing = sorted(set(range(max(about["ranks"] for about in abouts))) - {about["rank"] for about in abouts})
    if missing:
        said.append(f"the traces of ranks {_listed(missing)} are missing")
    cut = [about["rank"] for about in abouts if not about["complete"]]
    if cut:
        said.append(f"the traces of ranks {_listed(cut)} have only the newest events")
    off = max((reading["round_trip"] for about in abouts for reading in about["clock"]), default=0.0) / 2
    said.append(f"clocks agree to {1e6 * off:.1f} us or better")
    return said


def _listed(ranks: list[int]) -> str:
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


def _require_event(event: Any) -> None:
    """Raise unless an event has what the table is made of, by its kind."""
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


def _require_times(found: dict[str, Any], *keys: str) -> None:
    for key in keys:
        if not 0 <= abs(found[key]) <= _LATEST_US:
            raise ValueError(f"its {key!r} is {shown(found[key])}, which is no time")
