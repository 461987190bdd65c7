"""The emulated cluster, as far as it needs no namespaces: its rates, and the commands that make and remove it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from apps.emulator import network
from apps.emulator.__main__ import main
from apps.emulator.network import CONGESTION_CONTROLS, ENDING, ClusterError, Layout, Network
from apps.emulator.rate import BURST_S, token_bucket
from collectives.cost.rate import Rate

# What TCP hands down at once, as packets of the least length that a path is sure to take, with Ethernet's, IPv4's and
# TCP's headers, time stamps among them.
SEGMENT_BYTES = 1 << 16
PACKET_BYTES, HEADER_BYTES = 536, 14 + 20 + 32


def bucket(text: str) -> dict[str, int]:
    """Burst and limit of the token bucket at a rate."""
    kind, *words = token_bucket(Rate.parse(text))
    assert kind == "tbf"
    named = dict(zip(words[::2], words[1::2], strict=True))
    assert float(named.pop("rate").removesuffix("bit")) == Rate.parse(text).bits_per_s
    return {name: int(value) for name, value in named.items()}


@pytest.mark.parametrize("rate", ["10kbit", "1mbit", "100mbit", "639mbit", "1gbit", "100gbit"])
def test_a_bucket_holds_whatever_tcp_hands_down_at_once(rate: str) -> None:
    headers = math.ceil(SEGMENT_BYTES / PACKET_BYTES) * HEADER_BYTES
    assert bucket(rate)["burst"] >= SEGMENT_BYTES + headers


@pytest.mark.parametrize(
    ("rate", "burst", "queue"),
    [
        ("10mbit", 80_000, 1_000_000),
        ("640mbit", 80_000, 4_000_000),
        ("648mbit", 81_000, 4_050_000),
        ("1gbit", 125_000, 6_250_000),
        ("100gbit", 12_500_000, 625_000_000),
    ],
)
def test_a_bucket_holds_no_more_than_that_or_a_millisecond_and_room_is_left_for_what_waits(
    rate: str, burst: int, queue: int
) -> None:
    """A larger one would hide the rate from short messages."""
    assert bucket(rate) == {"burst": burst, "limit": burst + queue}
    assert BURST_S == 1e-3


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Record the commands instead of running them."""
    made: list[tuple[str, ...]] = []

    def run(*command: str) -> str:
        made.append(command)
        return ""

    monkeypatch.setattr(network, "run", run)
    return made


@pytest.mark.parametrize("known", [("cubic", "reno"), ("reno",), ()])
def test_every_host_sends_by_cubic_or_where_the_kernel_has_none_by_reno(
    known: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []

    def run(*command: str) -> str:
        commands.append(command)
        if "congctl" in command and command[-1] not in known:
            raise ClusterError(f"no {command[-1]}")
        return ""

    monkeypatch.setattr(network, "run", run)
    cluster = Network(Layout((Rate(),) * 3))
    if not known:
        with pytest.raises(ClusterError, match="no reno"):
            cluster._build()
        return
    cluster._build()
    for node in cluster.nodes:
        of_host = [command for command in commands if node.namespace in command]
        route = ("ip", "-n", node.namespace, "route", "replace", network.SUBNET, "dev", "eth0", "src", node.address)
        tried = CONGESTION_CONTROLS[: 1 + CONGESTION_CONTROLS.index(known[0])]
        assert of_host[-len(tried) :] == [(*route, "congctl", name) for name in tried]
        up = of_host[-len(tried) - 1]  # a route needs a device that is up
        assert up == ("ip", "-n", node.namespace, "link", "set", "eth0", "up")


@pytest.mark.parametrize(("there", "absent"), [([], "ip"), (["ip"], "tc")])
def test_without_iproute2_nothing_is_built_and_the_cure_is_named(
    there: list[str],
    absent: str,
    commands: list[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in there:
        (tmp_path / name).symlink_to("/bin/true")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("apps.emulator.__main__.require_mpirun", lambda mpi: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--nodes", "2", "--", "true"]) == 1
    told = f"error: {absent} is not there: install iproute2 (Debian: apt install iproute2)"
    assert capsys.readouterr().err.strip() == told
    assert not commands


VERSIONS = {
    "openmpi": ["mpirun (Open MPI) 4.1.4", "mpirun (Open MPI) 5.0.11"],
    "mpich": ["HYDRA build details:\n    Version:                                 5.0.2"],
}


@pytest.mark.parametrize("mpi", VERSIONS)
@pytest.mark.parametrize(
    ("told", "whose"), [(told, mpi) for mpi, versions in (*VERSIONS.items(), ("neither", ["3.0"])) for told in versions]
)
def test_options_of_one_mpi_do_not_go_to_the_launcher_of_another(
    told: str, whose: str, mpi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo '{told}'\n")
    launcher.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))  # it ends for lack of unshare in any case
    assert main(["--mpi", mpi, "--", "true"]) == 1
    refused = f"error: {launcher} is not the launcher of --mpi {mpi}: it calls itself '{told.splitlines()[0]}'; choose "
    assert capsys.readouterr().err.startswith(refused) == (mpi != whose)


@pytest.mark.parametrize(
    ("unshare", "problem"),
    [
        (None, "No such file or directory"),
        ("echo 'unshare failed: No space left on device' >&2; exit 1", "No space left"),
    ],
)
def test_a_user_without_namespaces_gets_the_cure(
    unshare: str | None,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if unshare is not None:
        (tmp_path / "unshare").write_text(f"#!/bin/sh\n{unshare}\n")
        (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setattr("apps.emulator.__main__.require_mpirun", lambda mpi: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--", "true"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: emulated hosts need root, and this kernel gives users no namespaces (")
    assert problem in told
    assert told.endswith("): use sudo\n")


def test_delay_and_loss_are_netems_and_the_rate_is_beneath_them(commands: list[tuple[str, ...]]) -> None:
    Network(Layout((Rate(1e9), Rate()), delay_ms=5.0, loss_percent=1.0))._build()
    added = [command[2:] for command in commands if command[0] == "tc"]
    netem = ("root", "handle", "1:", "netem", "delay", "5.0ms", "loss", "1.0%")
    names = [node.namespace for node in Network(Layout((Rate(), Rate()))).nodes]
    assert [command for command in added if "netem" in command] == [
        (name, "qdisc", "add", "dev", "eth0", *netem) for name in names
    ]
    (rate,) = [command for command in added if "tbf" in command]
    assert rate[:7] == (names[0], "qdisc", "add", "dev", "eth0", "parent", "1:")


@pytest.mark.parametrize("number", ENDING)
def test_who_is_ended_while_removing_removes_the_rest_first(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted, came = [], []

    def run(*command: str) -> str:
        if "delete" in command:
            os.kill(os.getpid(), number)
            subprocess.run(["sh", "-c", f"kill -{number:d} $$"], check=True)  # a terminal tells the commands as well
            assert not came
            deleted.append(command[-1])
        return ""

    monkeypatch.setattr(network, "run", run)
    monkeypatch.setattr(network, "NAMESPACES", tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).touch()
    previous = signal.signal(number, lambda number, _: came.append(number))
    done = threading.Event()
    threading.Thread(target=done.wait).start()  # takes the signal where this thread does not
    try:
        network.remove(["a", "b"])
        assert deleted == ["a", "b"]
        assert came == [number]
    finally:
        done.set()
        signal.signal(number, previous)
