"""Costs of communication: calls that overlap, or are under way during backward, count once and from its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from apps.train.meter import Meter
from collectives import Traffic


def aggregators(*spans: tuple[float, float]) -> Any:
    """Return stand-ins whose last calls began and ended then."""
    made = []
    for started, ended in spans:
        traffic = Traffic(calls=1, bytes_sent=10, messages=1)
        traffic.started, traffic.ended = started, ended
        made.append(SimpleNamespace(traffic=SimpleNamespace(last=traffic), comm=SimpleNamespace(size=2)))
    return made


@pytest.mark.parametrize(
    ("spans", "since", "seconds"),
    [
        ([(1.0, 2.0), (2.5, 3.0)], 0.0, 1.5),  # one after the other
        ([(1.0, 4.0), (2.0, 3.0), (2.0, 5.0)], 0.0, 4.0),  # at the same time
        ([(1.0, 4.0), (2.0, 5.0)], 3.5, 1.5),  # begun during backward
        ([(1.0, 2.0), (0.0, 0.0)], 3.0, 0.0),  # ended by then, or not made
    ],
)
def test_seconds_are_those_in_which_a_call_is_under_way(
    spans: list[tuple[float, float]], since: float, seconds: float
) -> None:
    meter = Meter()
    meter.count(aggregators(*spans), since)
    assert meter.seconds_communicating == pytest.approx(seconds)
    assert meter.bytes_sent == 10 * len(spans)
