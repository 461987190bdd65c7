"""A training run from end to end on the cluster: time to the same accuracy, whoever wins."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from apps.emulator.link_speed import measure
from apps.emulator.network import Network
from apps.emulator.rate import Rate
from apps.performance.cluster.drive import FAILURES, link_records, run_on_hosts, tell
from apps.performance.cluster.grid import Net
from apps.performance.record import table
from apps.train.plot import plot
from apps.train.run_records import read_run

NETS = (Net(4, "100mbit"), Net(4, "1gbit"))
EPOCHS = 3
# 5,824,522 parameters; 1024 images a step on four ranks
SETTINGS = (
    "--dataset", "fashion-mnist", "--model", "mlp", "--hidden", "2048,2048", "--batch", "256", "--epochs", str(EPOCHS),
    "--optimizer", "momentum", "--lr", "0.05", "--warmup-epochs", "0.25", "--topology", "ring",
)  # fmt: skip
WAYS: dict[str, tuple[str, ...]] = {
    "dense": ("--algorithm", "dense"),
    "dense, every 8 local steps": ("--algorithm", "dense", "--synchronize", "updates", "--local-steps", "8"),
    "Marsit, K = 100": ("--algorithm", "marsit", "--full-precision-every", "100"),
    "Marsit, K = none": ("--algorithm", "marsit", "--full-precision-every", "none"),
}
STEP = 0.005  # accuracy that all are asked for is a multiple of it


def run(folder: Path, fresh: bool) -> list[str]:
    """Train what is missing; returns what failed."""
    failed = []
    for net in NETS:
        missing = [way for way in WAYS if fresh or not _complete(_path(folder, net, way))]
        if not missing:
            continue
        try:
            with tempfile.TemporaryDirectory(prefix="mpicomp-cluster-") as scratch, Network(net.layout) as network:
                links = {"kind": "links", "links": link_records(measure(network))}
                for way in missing:
                    tell(f"training: {net.links}, {way}")
                    path = _path(folder, net, way)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    arguments = ["-m", "apps.train", *SETTINGS, *WAYS[way], "--json", str(path.resolve())]
                    run_on_hosts(network, Path(scratch), f"training of {way} on {net.name}", arguments)
                    path.write_text(json.dumps(links) + "\n" + path.read_text())
        except FAILURES as error:
            failed.append(f"training, {net.name}: {error}")
    return failed


def records(folder: Path) -> dict[Net, dict[str, list[dict[str, Any]]]]:
    """The lines of every complete run."""
    return {
        net: {way: read_run(_path(folder, net, way)) for way in WAYS if _complete(_path(folder, net, way))}
        for net in NETS
    }


def draw(found: dict[Net, dict[str, list[dict[str, Any]]]], folder: Path) -> list[Path]:
    """Accuracy against epochs, bytes and seconds, a figure for each rate."""
    drawn = []
    for net, runs in found.items():
        if runs:
            drawn.append(folder / f"cluster-training-{net.rate}.png")
            plot(list(runs.items()), drawn[-1])
    return drawn


def render(found: dict[Net, dict[str, list[dict[str, Any]]]]) -> str:
    """A table for each rate."""
    texts = []
    for net, runs in found.items():
        if runs:
            goal = int(min(_epochs(lines)[-1]["accuracy"] for lines in runs.values()) / STEP) * STEP
            rows = [_row(way, lines, goal) for way, lines in runs.items()]
            columns = (
                "way", f"seconds to {goal:.1%}", f"accuracy after {EPOCHS} epochs", "seconds", "of them communicating",
                "MB sent by a rank",
            )  # fmt: skip
            texts.append(f"**4 nodes, {net.links}**\n\n{table(columns, rows)}{_rates(runs.values())}")
    return "\n\n".join(texts) or "Not measured yet."


def _rates(runs: Iterable[Sequence[dict[str, Any]]]) -> str:
    """What the slowest link carried before the runs; older ones do not tell."""
    measured = [lines[0]["links"] for lines in runs if lines[0]["kind"] == "links"]
    slowest = sorted(min(link["bits_per_s"] for link in links) for links in measured)
    ends = dict.fromkeys(str(Rate(round(rate, -5))) for rate in (slowest[:1] + slowest[-1:]))
    return f"\n\n<sub>Payload that the slowest link carried before: {' to '.join(ends)}.</sub>" if ends else ""


def seconds_to(goal: float, epochs: Sequence[dict[str, Any]]) -> float | None:
    """Training seconds until the accuracy is reached, on straight lines between the ends of epochs; None: never."""
    before = {"seconds_so_far": 0.0, "accuracy": 0.0}
    for epoch in epochs:
        if epoch["accuracy"] >= goal:
            part = (goal - before["accuracy"]) / (epoch["accuracy"] - before["accuracy"])
            return float(before["seconds_so_far"] + part * (epoch["seconds_so_far"] - before["seconds_so_far"]))
        before = epoch
    return None


def _row(way: str, lines: Sequence[dict[str, Any]], goal: float) -> tuple[str, ...]:
    epochs = _epochs(lines)
    last, reached = epochs[-1], seconds_to(goal, epochs)
    return (
        way,
        "–" if reached is None else f"{reached:.0f}",
        f"{last['accuracy']:.2%}",
        f"{last['seconds_so_far']:.0f}",
        f"{last['seconds_communicating_so_far']:.0f}",
        f"{last['bytes_so_far_per_rank'] / 1e6:.4g}",
    )


def _epochs(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "epoch"]


def _path(folder: Path, net: Net, way: str) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in way.lower())
    return folder / f"{net.name}-{name}.json"


def _complete(path: Path) -> bool:
    if not path.exists():
        return False
    lines = path.read_text().splitlines()
    return bool(lines) and json.loads(lines[-1])["kind"] == "result"
