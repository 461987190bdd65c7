"""A raw transfer between two hosts: the real rate of a link."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from apps.emulator.network import ClusterError, Network, Node
from collectives.cost.rate import Rate

SECONDS = 0.5  # about as long as a transfer takes
LEAST_BYTES, MOST_BYTES = 2_000_000, 2_000_000_000
UNLIMITED_BYTES = 500_000_000
# TCP over Ethernet: 1448 of 1514 bytes are payload. Above the rate only what the bucket holds at the start.
LOWEST, HIGHEST = 0.85, 1.04
TRIES = 4
PORT = 7777

_RECEIVE = """
import socket, sys, time
listener = socket.create_server(("", {port}))
listener.settimeout(30)
print("ready", flush=True)
peer, _ = listener.accept()
buffer, left = memoryview(bytearray(1 << 20)), {nbytes}
left -= peer.recv_into(buffer)
start, first = time.perf_counter(), left
while left > 0:
    got = peer.recv_into(buffer)
    if not got:
        sys.exit("the connection broke")
    left -= got
print(8 * first / (time.perf_counter() - start))
"""
_SEND = """
import socket
with socket.create_connection(("{address}", {port}), timeout=30) as peer:
    block, left = bytes(1 << 20), {nbytes}
    while left > 0:
        left -= peer.send(block[: min(left, len(block))])
"""


@dataclass(frozen=True)
class Measured:
    """One link, and the bits per second of payload that it carries."""

    what: str
    requested: Rate
    bits_per_s: float

    @property
    def true(self) -> bool:
        """Flag: the link has the requested rate."""
        requested = self.requested.bits_per_s
        return requested is None or LOWEST * requested <= self.bits_per_s <= HIGHEST * requested

    def __str__(self) -> str:
        return f"{self.what}: {Rate(self.bits_per_s)} of payload measured, {self.requested} requested"


def transfer(sender: Node, receiver: Node, nbytes: int) -> float:
    """Bits per second of one TCP connection; ClusterError if it cannot be made."""
    program = receiver.command([sys.executable, "-c", _RECEIVE.format(port=PORT, nbytes=nbytes)])
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        try:
            listening.stdout.readline()
            script = _SEND.format(address=receiver.address, port=PORT, nbytes=nbytes)
            sending = sender.command([sys.executable, "-c", script])
            sent = subprocess.run(sending, capture_output=True, text=True, timeout=120, check=False)
            output, errors = listening.communicate(timeout=120)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{sender.name} cannot send {nbytes} bytes to {receiver.name}: {error}") from error
        finally:
            listening.kill()
    if sent.returncode or not output.strip():
        raise ClusterError(f"{sender.name} cannot reach {receiver.name}: {(sent.stderr or errors).strip()}")
    return float(output)


def measure(network: Network) -> list[Measured]:
    """Measure every node's egress, to a neighbour of its group, and every group's uplink."""
    layout, nodes = network.layout, network.nodes
    of_a_group = layout.nodes // layout.groups
    found = []
    for i, (node, rate) in enumerate(zip(nodes, layout.rates, strict=True)):
        first = layout.group(i) * of_a_group
        if of_a_group > 1:
            neighbour = nodes[first + (i - first + 1) % of_a_group]
            found.append(_link(f"{node.name} to {neighbour.name}", node, neighbour, rate))
    for group in range(layout.groups if layout.groups > 1 else 0):
        here, there = group * of_a_group, (group + 1) % layout.groups * of_a_group
        slowest = min((layout.rates[here], layout.between), key=lambda rate: rate.bits_per_s or float("inf"))
        what = f"group {group} to group {(group + 1) % layout.groups}"
        found.append(_link(what, nodes[here], nodes[there], slowest))
    # links that carry less than their rate, or more
    wrong = [link for link in found if not link.true]
    if wrong and not (layout.delay_ms or layout.loss_percent):
        raise ClusterError(
            f"{'; '.join(map(str, wrong))}. Links that are faster than this machine's processors cannot be emulated; "
            "on an idle machine, try a lower rate"
        )
    return found


def _link(what: str, sender: Node, receiver: Node, rate: Rate) -> Measured:
    bits_per_s = rate.bits_per_s
    nbytes = UNLIMITED_BYTES
    if bits_per_s is not None:
        nbytes = round(min(MOST_BYTES, max(LEAST_BYTES, bits_per_s / 8 * SECONDS)))
    link = Measured(what, rate, transfer(sender, receiver, nbytes))
    for _ in range(TRIES - 1):  # a busy machine is late now and then
        if link.true:
            break
        link = Measured(what, rate, transfer(sender, receiver, nbytes))
    return link
