"""Hosts in network namespaces, joined by bridges over veth pairs whose egress is shaped.

Everything lives in namespaces of its own, the bridges too, so that nothing of the machine's network is touched and
nothing leaves::

    node 0  eth0 ---- node0 |
    node 1  eth0 ---- node1 | bridge group0 | ---- shaped both ways ---- | bridge group1 | node2 ---- eth0  node 2
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from apps.emulator.rate import token_bucket
from collectives.cost.rate import Rate

PREFIX = "mpicomp-"
SUBNET = "10.77.0.0/16"
# Linux's own default, which every kernel has. BBR all but stops for 200 ms every ten seconds to measure the delay.
CONGESTION_CONTROLS = ("cubic", "reno")
MOST_NODES = 64
NAMESPACES = Path("/run/netns")
GRACE_S = 5.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals by which this process is ended


class ClusterError(RuntimeError):
    """The cluster cannot be made as asked; the message has the cause and the cure."""


@dataclass(frozen=True)
class Layout:
    """Layout of a cluster: nodes in equal `groups` of neighbours; ValueError if it cannot be built."""

    rates: tuple[Rate, ...]  # of the nodes' egress
    groups: int = 1
    between: Rate = field(default_factory=Rate)  # of the link from a group to all others, each way
    delay_ms: float = 0.0  # added to each node's egress, as is loss; both need the kernel's netem
    loss_percent: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"a cluster has 1 to {MOST_NODES} nodes, not {self.nodes}")
        if self.groups < 1 or self.nodes % self.groups:
            raise ValueError(f"{self.nodes} nodes cannot be divided into {self.groups} equal groups")
        if self.delay_ms < 0 or not 0 <= self.loss_percent < 100:
            raise ValueError("a delay is 0 ms or more, a loss from 0 to below 100 per cent")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.rates)

    def group(self, node: int) -> int:
        """A node's group."""
        return node * self.groups // self.nodes


@dataclass(frozen=True)
class Node:
    """A host: hostname, network namespace and address."""

    name: str
    namespace: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on this host: with its network and its hostname."""
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *rename, *arguments]


class Network:
    """The cluster's hosts and links within a ``with`` statement; ClusterError without root or tools."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        self.nodes = [Node(f"node{i}", f"{self._prefix}{i}", f"10.77.0.{i + 1}") for i in range(layout.nodes)]

    def __enter__(self) -> Network:
        if os.geteuid():
            raise ClusterError("network namespaces need root: run this with sudo, or a job by python -m apps.emulator")
        for program in ("ip", "tc"):
            if shutil.which(program) is None:
                raise ClusterError(f"{program} is not there: install iproute2 (Debian: apt install iproute2)")
        remove([path.name for path in NAMESPACES.glob(f"{PREFIX}*") if not _alive(path.name)])  # of killed processes
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        remove([*(node.namespace for node in self.nodes), self._switch])

    def cut(self, node: int) -> None:
        """Cut a host's link for ever: packets both ways are lost, and no program is notified."""
        run("ip", "-n", self._switch, "link", "set", self.nodes[node].name, "down")

    def _build(self) -> None:
        layout = self.layout
        run("ip", "netns", "add", self._switch)
        for group in range(layout.groups):
            self._bridge(f"group{group}")
        if layout.groups > 1:
            self._bridge("core")
        for group in range(layout.groups if layout.groups > 1 else 0):
            up, down = f"up{group}", f"down{group}"
            run("ip", "-n", self._switch, "link", "add", up, "type", "veth", "peer", "name", down)
            for device, bridge in ((up, f"group{group}"), (down, "core")):
                run("ip", "-n", self._switch, "link", "set", device, "master", bridge, "up")
                self._shape(self._switch, device, layout.between)
        for i, (node, rate) in enumerate(zip(self.nodes, layout.rates, strict=True)):
            run("ip", "netns", "add", node.namespace)
            port = ("peer", "name", node.name, "netns", self._switch)
            run("ip", "-n", node.namespace, "link", "add", "eth0", "type", "veth", *port)
            run("ip", "-n", self._switch, "link", "set", node.name, "master", f"group{layout.group(i)}", "up")
            address = f"{node.address}/{SUBNET.partition('/')[2]}"
            run("ip", "-n", node.namespace, "address", "add", address, "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", node.namespace, "link", "set", device, "up")
            # A congestion control that real clusters use, also if this machine uses another.
            route = ("ip", "-n", node.namespace, "route", "replace", SUBNET, "dev", "eth0", "src", node.address)
            first, other = CONGESTION_CONTROLS
            try:
                run(*route, "congctl", first)
            except ClusterError:
                run(*route, "congctl", other)
            self._shape(node.namespace, "eth0", rate, layout.delay_ms, layout.loss_percent)

    def _bridge(self, name: str) -> None:
        run("ip", "-n", self._switch, "link", "add", name, "type", "bridge", "forward_delay", "0")
        run("ip", "-n", self._switch, "link", "set", name, "up")

    def _shape(self, namespace: str, device: str, rate: Rate, delay_ms: float = 0.0, loss_percent: float = 0.0) -> None:
        parent = ["root"]
        if delay_ms or loss_percent:
            chosen = ["delay", f"{delay_ms}ms", *(["loss", f"{loss_percent}%"] if loss_percent else [])]
            try:
                run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "handle", "1:", "netem", *chosen)
            except ClusterError as error:
                raise ClusterError(
                    f"delay and loss need the kernel's module sch_netem, which is not there ({error}); leave out "
                    "--delay-ms and --loss-percent"
                ) from error
            parent = ["parent", "1:"]
        if rate.bits_per_s is not None:
            run("tc", "-n", namespace, "qdisc", "add", "dev", device, *parent, *token_bucket(rate))


def run(*command: str) -> str:
    """Run a command of iproute2 and return its output; ClusterError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def remove(namespaces: Sequence[str]) -> None:
    """End the processes in namespaces, and delete those that are there; only then this process can be ended."""
    there = [name for name in namespaces if (NAMESPACES / name).exists()]
    deadline = time.monotonic() + GRACE_S
    with _undisturbed():
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in _processes(there):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            while any(_processes(there)) and time.monotonic() < deadline:
                time.sleep(0.05)
        for name in there:
            with suppress(ClusterError):
                run("ip", "netns", "delete", name)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put off signals that would end this process, or the commands it runs, until the block is done."""
    came: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # for this thread and the commands
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ENDING}  # for others
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # first: a signal that still waits is one that `came`
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for first in came[:1]:
        signal.raise_signal(first)


def _alive(namespace: str) -> bool:
    owner = namespace.removeprefix(PREFIX).partition("-")[0]
    return owner.isdigit() and Path(f"/proc/{owner}").exists()


def _processes(namespaces: Sequence[str]) -> Iterator[int]:
    for name in namespaces:
        with suppress(ClusterError):
            yield from map(int, run("ip", "netns", "pids", name).split())
