"""The emulated cluster: real hosts in namespaces, real rates, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.cluster.__main__ import main
from apps.cluster.network import CONGESTION_CONTROLS, NAMESPACES, PREFIX, Layout, Network
from apps.cluster.network import run as run_command
from apps.cluster.rates import Rate

PROJECT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
NAME = "from mpi4py import MPI; print(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.Get_processor_name(), flush=True)"
SLEEP = "import time, mpicomp; comm = mpicomp.Communicator(); print('started', flush=True); time.sleep(60)"


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "apps.cluster", *arguments],
        cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # type: ignore[call-overload, no-any-return]  # fmt: skip


def run(*arguments: str) -> tuple[int, str, str]:
    with start(*arguments) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output, errors


def left(pid: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{PREFIX}{pid}-*")]


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[str]]:
    """A cluster whose ranks have started and sleep."""
    with start("--nodes", "2", "--no-check", "--", sys.executable, "-c", SLEEP) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "started"
        assert len(left(process.pid)) == 3
        yield process
        process.kill()


def test_every_node_is_a_host_of_its_own() -> None:
    status, output, errors = run(
        "--nodes", "3", "--ranks-per-node", "2", "--no-check", "--", sys.executable, "-c", NAME
    )
    assert status == 0, errors
    assert sorted(output.split("\n")[:-1]) == [f"{rank} 6 node{rank // 2}" for rank in range(6)]


# Listens on one host, connects from the other, and tells what both ends send by.
LISTEN = """
import socket
with socket.create_server(("", 7777)) as server:
    server.settimeout(60)
    print("listening", flush=True)
    connection, _ = server.accept()
    print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
"""
CONNECT = """
import socket, sys
with socket.create_connection((sys.argv[1], 7777), timeout=60) as connection:
    print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
"""


def test_hosts_send_by_what_clusters_use_whatever_the_machine_does() -> None:
    with Network(Layout((Rate(), Rate()))) as cluster:
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        expected = next(name for name in CONGESTION_CONTROLS if name in known)
        other = next(name for name in ("bbr", "reno", "cubic") if name in known and name != expected)
        listening, connecting = cluster.nodes
        for node in cluster.nodes:
            default = f"echo {other} >/proc/sys/net/ipv4/tcp_congestion_control"
            run_command(*node.command(["sh", "-c", default]))
        command = listening.command([sys.executable, "-c", LISTEN])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            found = run_command(*connecting.command([sys.executable, "-c", CONNECT, listening.address]))
            assert [found, server.stdout.read()] == [f"{expected}\n"] * 2


def test_links_carry_what_was_asked_for_a_straggler_less() -> None:
    status, _, errors = run("--nodes", "3", "--rate", "200mbit,200mbit,50mbit", "--", "sleep", "0.3")
    assert status == 0, errors
    measured = [float(line.split()[3]) for line in errors.splitlines() if "of payload" in line]
    assert len(measured) == 3
    assert measured[0] == pytest.approx(190, rel=0.1)
    assert measured[2] == pytest.approx(47.5, rel=0.1)


def test_links_between_groups_are_slower_than_within() -> None:
    status, _, errors = run(
        "--nodes", "4", "--groups", "2", "--rate", "400mbit", "--between", "40mbit", "--", "sleep", "0.3"
    )
    assert status == 0, errors
    between = [line for line in errors.splitlines() if line.startswith("group")]
    assert len(between) == 2
    assert all("40 Mbit/s asked for" in line for line in between)


def test_the_jobs_exit_status_is_handed_on() -> None:
    status, _, _ = run("--nodes", "2", "--no-check", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert status == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_interrupted_leaves_nothing_behind(sleeping: subprocess.Popen[str], number: signal.Signals) -> None:
    sleeping.send_signal(number)
    assert sleeping.wait(30) == 128 + number
    assert not left(sleeping.pid)


def test_what_a_killed_cluster_leaves_behind_the_next_one_removes(sleeping: subprocess.Popen[str]) -> None:
    sleeping.kill()
    sleeping.wait(30)
    assert left(sleeping.pid)
    assert run("--nodes", "1", "--no-check", "--", "sleep", "0.3")[0] == 0
    assert not left(sleeping.pid)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nodes", "2", "--rate", "fast", "--", "sleep", "0.3"], "'fast' is no rate"),
        (["--nodes", "3", "--rate", "1gbit,1gbit", "--", "sleep", "0.3"], "2 rates for 3 nodes"),
        (["--nodes", "3", "--groups", "2", "--", "sleep", "0.3"], "3 nodes cannot be divided into 2 equal groups"),
        (["--nodes", "2"], "what is to run"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments: list[str], told: str) -> None:
    status, _, errors = run(*arguments)
    assert status == 2
    assert told in errors


def test_without_root_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["--nodes", "2", "--", "true"]) == 1
    assert capsys.readouterr().err.strip() == "error: network namespaces need root: run this with sudo"


def test_delay_works_or_the_missing_module_is_named() -> None:
    status, _, errors = run("--nodes", "2", "--delay-ms", "5", "--", "sleep", "0.3")
    assert status == 0 or "sch_netem" in errors
