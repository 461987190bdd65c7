"""The emulated cluster: real hosts in namespaces, real rates, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from apps.emulator.network import CONGESTION_CONTROLS, NAMESPACES, PREFIX, ClusterError, Layout, Network
from apps.emulator.network import run as run_command
from collectives.cost.rate import Rate

PROJECT = Path(__file__).resolve().parents[2]
MPICH = PROJECT / ".venv-mpich" / "bin" / "python"
with_mpich = pytest.mark.skipif(not MPICH.exists(), reason="make test-mpich has not made the environment with MPICH")
TIMEOUT_S = 120
NAME = "from mpi4py import MPI; print(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.Get_processor_name(), flush=True)"
SLEEP = "import time, mpicomp; comm = mpicomp.Communicator(); print('started', flush=True); time.sleep(60)"


def start(*arguments: str, python: str = sys.executable, own_session: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-m", "apps.emulator", *arguments],
        cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=own_session,
    )  # fmt: skip


def run(*arguments: str, python: str = sys.executable) -> tuple[int, str, str]:
    with start(*arguments, python=python) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output, errors


def left(pid: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{PREFIX}{pid}-*")]


def on_hosts(pid: int) -> list[int]:
    return [int(found) for name in left(pid) for found in run_command("ip", "netns", "pids", name).split()]


def require_nothing_left(process: subprocess.Popen[str], pids: list[int]) -> None:
    assert not left(process.pid)
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)
    assert not {"node0", "group0"} & {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[str]]:
    """A cluster whose ranks have started and sleep."""
    with start("--nodes", "2", "--no-check", "--", sys.executable, "-c", SLEEP, own_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "started"
        assert len(left(process.pid)) == 3
        yield process
        process.kill()


@pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False).returncode != 0,
    reason="this kernel gives users no namespaces",
)
def test_users_who_are_not_root_have_hosts_in_a_user_namespace() -> None:
    job = [sys.executable, "-m", "apps.emulator", "--nodes", "2", "--rate", "100mbit", "--", sys.executable, "-c", NAME]
    as_user = ["unshare", "--user", "--map-user=1000", "--map-group=1000", *job]
    found = subprocess.run(as_user, cwd=PROJECT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (found.returncode, sorted(found.stdout.split("\n"))) == (0, ["", "0 2 node0", "1 2 node1"]), found.stderr
    assert "without root: the hosts are in a user namespace" in found.stderr


def test_every_node_is_a_host_of_its_own() -> None:
    status, output, errors = run(
        "--nodes", "3", "--ranks-per-node", "2", "--no-check", "--", sys.executable, "-c", NAME
    )
    assert status == 0, errors
    assert sorted(output.split("\n")[:-1]) == [f"{rank} 6 node{rank // 2}" for rank in range(6)]


def test_a_job_does_not_meet_the_files_of_killed_launchers() -> None:
    show = "import os; print(os.environ['PMIX_SERVER_TMPDIR'], flush=True)"
    status, output, errors = run("--nodes", "2", "--no-check", "--", sys.executable, "-c", show)
    assert status == 0, errors
    folders = [Path(line) for line in output.splitlines()]
    assert [folder.parent.name.startswith("mpicomp-cluster-") for folder in folders] == [True, True], output


SUM = """
import sys, numpy as np, mpicomp
from mpi4py import MPI
with mpicomp.Communicator() as comm:
    found = comm.allreduce(np.full(1000, comm.rank + 1, np.float32))
    library = MPI.Get_library_version().split()[0]
    sys.stdout.write(f"{comm.rank} {MPI.Get_processor_name()} {library} {set(found.tolist())}\\n")
"""


@with_mpich
def test_mpich_sums_over_hosts_of_its_own() -> None:
    status, output, errors = run(
        "--nodes", "3", "--mpi", "mpich", "--no-check", "--", str(MPICH), "-c", SUM, python=str(MPICH)
    )
    assert status == 0, errors
    assert sorted(output.splitlines()) == [f"{rank} node{rank} MPICH {{6.0}}" for rank in range(3)]


@with_mpich
def test_each_mpi_is_told_from_the_other() -> None:
    """Start ranks by the real launchers; a stand-in reports the same in the unit tests."""
    for python, mpi in ((sys.executable, "mpich"), (str(MPICH), "openmpi")):
        status, _, errors = run("--mpi", mpi, "--", "sleep", "0.3", python=python)
        assert status == 1
        assert f"{Path(python).with_name('mpirun')} is not the launcher of --mpi {mpi}" in errors


def test_a_benchmark_runs_as_documented() -> None:
    status, output, errors = run("--nodes", "2", "--rate", "100mbit", "--", "mpicomp", "bench", "--count", "1e4")
    assert status == 0, errors
    assert "2 ranks on 2 hosts" in output
    assert re.search(r"^ +40000 +10000 .* ok$", output, re.MULTILINE), output


BETWEEN_NODES = """
import numpy as np, mpicomp
from apps.performance.cluster.rounds import wire_bytes
with mpicomp.Communicator(topology="ring") as comm:
    aggregator = mpicomp.PerNode(mpicomp.Marsit(None)).start(comm, 8_000_000)
    x = np.ones(8_000_000, np.float32)
    aggregator.aggregate(x)
    comm.barrier()
    before = wire_bytes()
    aggregator.aggregate(x)
    comm.barrier()
    sent = comm.allreduce(wire_bytes() - before, "max")
    if comm.rank == 0:
        print(comm.local_size, *comm.layout.sizes, sent, flush=True)
"""


def test_bytes_between_hosts_do_not_grow_with_their_ranks() -> None:
    sent = []
    for ranks in (1, 2):
        status, output, errors = run(
            "--nodes", "2", "--ranks-per-node", str(ranks), "--no-check", "--", sys.executable, "-c", BETWEEN_NODES
        )
        assert status == 0, errors
        *sizes, count = map(int, output.split())
        assert sizes == [ranks] * 3  # hosts are nodes
        sent.append(count)
    assert sent[0] == pytest.approx(1_000_000, rel=0.2)  # a bit of each element, with headers
    assert sent[1] == pytest.approx(sent[0], rel=0.1)


def test_advice_goes_by_the_rate_of_the_links(tmp_path: Path) -> None:
    record = tmp_path / "advice.json"
    # far more than the token bucket holds
    advise = ["mpicomp", "advise", "--count", "1e5", "--methods", "marsit", "--json", str(record)]
    status, output, errors = run("--nodes", "2", "--rate", "100mbit", "--no-check", "--", *advise)
    assert status == 0, errors
    assert 8 * json.loads(record.read_text())["network"]["bandwidth_bytes_s"] == pytest.approx(96e6, rel=0.25)
    assert "\nCompress with marsit " in output, output  # 33 ms dense, 3 packed


# Listens on one host, connects from the other, and prints the addresses that both ends send by.
TELL = "print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())"
LISTEN = f"""
import socket
with socket.create_server(("", 7777)) as server:
    server.settimeout(60)
    print("listening", flush=True)
    connection, _ = server.accept()
    {TELL}
"""
CONNECT = f"""
import socket, sys
with socket.create_connection((sys.argv[1], 7777), timeout=60) as connection:
    {TELL}
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
    assert all("40 Mbit/s requested" in line for line in between)


def test_the_jobs_exit_status_is_handed_on() -> None:
    status, _, _ = run("--nodes", "2", "--no-check", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert status == 7


@pytest.mark.parametrize(
    ("send", "number", "again"),
    [
        pytest.param(os.killpg, signal.SIGINT, False, id="a terminal's Ctrl-C"),
        pytest.param(os.killpg, signal.SIGINT, True, id="Ctrl-C again while hosts are removed"),
        pytest.param(os.kill, signal.SIGINT, False, id="SIGINT"),
        pytest.param(os.kill, signal.SIGTERM, False, id="SIGTERM"),
    ],
)
def test_who_is_interrupted_leaves_nothing_behind(
    sleeping: subprocess.Popen[str], send: Callable[[int, int], None], number: signal.Signals, again: bool
) -> None:
    pids = on_hosts(sleeping.pid)
    assert len(pids) >= 4  # two ranks at least, and two daemons
    send(sleeping.pid, number)
    if again:
        while len(left(sleeping.pid)) == 3 and sleeping.poll() is None:
            time.sleep(1e-4)
        send(sleeping.pid, number)
    assert sleeping.wait(30) == 128 + number
    require_nothing_left(sleeping, pids)


def test_what_a_killed_cluster_leaves_behind_the_next_one_removes(sleeping: subprocess.Popen[str]) -> None:
    pids = on_hosts(sleeping.pid)
    sleeping.kill()
    sleeping.wait(30)
    assert left(sleeping.pid)
    assert run("--nodes", "1", "--no-check", "--", "sleep", "0.3")[0] == 0
    require_nothing_left(sleeping, pids)


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


def test_a_network_without_root_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="need root: run this with sudo"):
        Network(Layout((Rate(), Rate()))).__enter__()


@pytest.mark.parametrize(("option", "chosen"), [("--delay-ms", "delay 5"), ("--loss-percent", "loss 5%")])
def test_delay_and_loss_work_or_the_missing_module_is_named(option: str, chosen: str) -> None:
    tried = "ip link add probe type veth && tc qdisc add dev probe root netem delay 1ms"
    there = subprocess.run(["unshare", "--net", "sh", "-c", tried], capture_output=True, check=False).returncode == 0
    with start(
        "--nodes", "2", option, "5", "--no-check", "--", "sh", "-c", "tc qdisc show dev eth0; sleep 0.3"
    ) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    if there:
        assert process.returncode == 0, errors
        assert len(re.findall(f"^qdisc netem 1: root .*{chosen}", output, re.MULTILINE)) == 2, output
    else:
        assert process.returncode == 1
        assert errors.startswith("error: delay and loss need the kernel's module sch_netem, which is not there (`tc ")
        assert errors.endswith("); leave out --delay-ms and --loss-percent\n")
        assert not left(process.pid)
