"""The emulated cluster, as far as it needs no namespaces: its rates, and the commands that make it."""

from __future__ import annotations

import math

import pytest

from apps.cluster import network
from apps.cluster.network import ClusterError, Layout, Network
from apps.cluster.rates import BURST_S, Rate

# What TCP hands down at once, as packets of the least length that a path is sure to take, with Ethernet's, IPv4's and
# TCP's headers, time stamps among them.
SEGMENT_BYTES = 1 << 16
PACKET_BYTES, HEADER_BYTES = 536, 14 + 20 + 32


def bucket(text: str) -> dict[str, int]:
    """Burst and limit of the token bucket at a rate."""
    kind, *words = Rate.parse(text).token_bucket
    assert kind == "tbf"
    named = dict(zip(words[::2], words[1::2], strict=True))
    assert float(named.pop("rate").removesuffix("bit")) == Rate.parse(text).bits_per_s
    return {name: int(value) for name, value in named.items()}


@pytest.mark.parametrize("rate", ["10kbit", "1mbit", "100mbit", "639mbit", "1gbit", "100gbit"])
def test_a_bucket_holds_whatever_tcp_hands_down_at_once(rate: str) -> None:
    headers = math.ceil(SEGMENT_BYTES / PACKET_BYTES) * HEADER_BYTES
    assert bucket(rate)["burst"] >= SEGMENT_BYTES + headers


def test_a_bucket_holds_no_more_than_that_or_a_millisecond() -> None:
    """A larger one would hide the rate from short messages."""
    found = {rate: bucket(rate)["burst"] for rate in ("100mbit", "640mbit", "648mbit", "1gbit", "100gbit")}
    assert found == {"100mbit": 80_000, "640mbit": 80_000, "648mbit": 81_000, "1gbit": 125_000, "100gbit": 12_500_000}
    assert BURST_S == 1e-3


def test_behind_the_bucket_there_is_room_for_what_waits() -> None:
    found = {rate: bucket(rate) for rate in ("10mbit", "1gbit")}
    assert {rate: of["limit"] - of["burst"] for rate, of in found.items()} == {"10mbit": 1_000_000, "1gbit": 6_250_000}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What would have been run."""
    made: list[tuple[str, ...]] = []

    def run(*command: str) -> str:
        made.append(command)
        return ""

    monkeypatch.setattr(network, "run", run)
    return made


def controls(commands: list[tuple[str, ...]]) -> list[tuple[str, str, str]]:
    """Namespace, source address and congestion control of every route to the cluster's hosts."""
    routes = [command for command in commands if "route" in command]
    for command in routes:
        assert command[3:8] == ("route", "replace", network.SUBNET, "dev", "eth0")
    named = [dict(zip(command[8::2], command[9::2], strict=True)) for command in routes]
    return [(command[2], words["src"], words["congctl"]) for command, words in zip(routes, named, strict=True)]


def test_every_host_sends_by_cubic(commands: list[tuple[str, ...]]) -> None:
    cluster = Network(Layout((Rate(),) * 3))
    cluster._build()
    assert controls(commands) == [(node.namespace, node.address, "cubic") for node in cluster.nodes]
    for node in cluster.nodes:  # a route needs a device that is up
        of_host = [command for command in commands if node.namespace in command]
        assert of_host[-2:-1] == [("ip", "-n", node.namespace, "link", "set", "eth0", "up")]


def test_a_kernel_without_cubic_sends_by_reno(commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: str) -> str:
        commands.append(command)
        if "cubic" in command:
            raise ClusterError("Error: congctl unknown")
        return ""

    monkeypatch.setattr(network, "run", run)
    cluster = Network(Layout((Rate(),)))
    cluster._build()
    (node,) = cluster.nodes
    assert controls(commands) == [(node.namespace, node.address, name) for name in ("cubic", "reno")]


def test_a_kernel_without_either_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: str) -> str:
        if "congctl" in command:
            raise ClusterError(f"no {command[-1]}")
        return ""

    monkeypatch.setattr(network, "run", run)
    with pytest.raises(ClusterError, match="no reno"):
        Network(Layout((Rate(),)))._build()
