"""Readers of traces for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomp.cli.trace import Message, RankTrace, read


def vector(rank: int, n: int = 40_000) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(n).astype(np.float32)


def everyones(comm: MPI.Intracomm, folder: Path) -> list[dict[str, Any]]:
    """All ranks' files, once they are all written, with spans that lie within each other or apart."""
    comm.Barrier()
    traces, notes = read(folder)
    assert not notes
    for trace in traces:
        require_nested(trace)
    assert [trace["otherData"]["rank"] for trace in traces] == list(range(comm.size))
    comm.Barrier()
    return traces


def spans(trace: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and (not kinds or event["cat"] in kinds)]


def require_nested(trace: dict[str, Any]) -> None:
    outer: list[float] = []
    for start, minus in sorted((round(1e3 * s["ts"]), -round(1e3 * s["dur"])) for s in spans(trace)):
        while outer and outer[-1] <= start:
            outer.pop()
        assert not outer or start - minus <= outer[-1]
        outer.append(start - minus)


def require_aligned(traces: list[dict[str, Any]]) -> set[Message]:
    """Every message is sent by one rank and received by another, and not before; returns the messages."""
    ranks = [RankTrace.of(trace) for trace in traces]
    sent = {message: times for rank in ranks for message, times in rank.sent.items()}
    received = {message: times for rank in ranks for message, times in rank.received.items()}
    assert sent.keys() == received.keys()
    readings = [reading for trace in traces for reading in trace["otherData"]["clock"]]
    tolerance = 1e6 * max(reading["round_trip"] for reading in readings)  # half of it for each of two ranks
    for message, (start, _) in sent.items():
        assert received[message][1] > start - tolerance, message
    return set(sent)
