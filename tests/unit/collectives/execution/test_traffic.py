"""Costs of calls, by several clocks."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import numpy as np
import pytest

import mpicomp
from collectives import Communicator, Traffic
from collectives.execution.traffic import COSTS, TrafficLog


def test_costs_are_all_that_adds_up() -> None:
    one = Traffic(calls=1, **{name: 1 + number for number, name in enumerate(COSTS)})
    both = Traffic()
    both.add(one)
    both.add(one)
    assert both.calls == 2
    assert [getattr(both, name) for name in COSTS] == [2 + 2 * number for number in range(len(COSTS))]


def test_what_a_call_cost_can_be_written_as_json() -> None:
    cost = Traffic(calls=1, bytes_sent=5)
    assert Traffic(**json.loads(json.dumps(asdict(cost)))) == cost
    assert json.loads(json.dumps(asdict(TrafficLog(last=cost))))["last"]["bytes_sent"] == 5


@pytest.mark.parametrize(
    "name", ["marsit", "dense", "ef-signsgd", "ssdm", "qsgd", "double-squeeze", "scalecom", "random-k"]
)
def test_seconds_are_those_of_the_clock_that_was_given(name: str) -> None:
    """Use a clock that goes on by one at each look: each stage takes at least one of its seconds."""

    def job(comm: Communicator) -> Traffic:
        asked = iter(range(10**9))
        aggregator = mpicomp.algorithm(name).start(comm, 20_000)
        aggregator.traffic.clock = lambda: float(next(asked))
        aggregator.aggregate(np.ones(20_000, np.float32))
        aggregator.traffic.clock = time.perf_counter
        counted = aggregator.traffic.last
        aggregator.aggregate(np.ones(20_000, np.float32))
        assert aggregator.traffic.last.seconds_total < 60
        return counted

    for counted in mpicomp.run_local(3, job):
        assert counted.seconds_total >= 1
        spent = [getattr(counted, part) for part in COSTS if part.startswith("seconds")]
        assert all(seconds == int(seconds) for seconds in spent), spent
