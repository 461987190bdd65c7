"""A training run from end to end on the cluster: time to the same accuracy, whichever method is fastest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from apps.emulator.mpirun import run_on_hosts
from apps.performance.cluster.driver import FAILURES, LONGEST_JOB_S, log, set_up_cluster
from apps.performance.cluster.grid import Cluster
from apps.performance.cluster.tables import ABSENT, NOTHING
from apps.performance.part import Column, get, table
from apps.train.run_records import read_run
from collectives.cost.rate import Rate
from mpicomp.cli.cluster_report.open_mpi_algorithms import SETTINGS as DYNAMIC_RULES

CLUSTERS = (Cluster(4, "100mbit"), Cluster(4, "1gbit"))
EPOCHS = 3
# 5,824,522 parameters; 1024 images a step on four ranks
SETTINGS = (
    "--dataset", "fashion-mnist", "--model", "mlp", "--hidden", "2048,2048", "--batch", "256", "--epochs", str(EPOCHS),
    "--optimizer", "momentum", "--lr", "0.05", "--warmup-epochs", "0.25", "--topology", "ring",
)  # fmt: skip
METHODS: dict[str, tuple[str, ...]] = {
    "dense": ("--algorithm", "dense"),
    "dense, every 8 local steps": ("--algorithm", "dense", "--synchronize", "updates", "--local-steps", "8"),
    "Marsit, K = 100": ("--algorithm", "marsit", "--full-precision-every", "100"),
    "Marsit, K = none": ("--algorithm", "marsit", "--full-precision-every", "none"),
}
STEP = 0.005  # the accuracy that all methods must reach is a multiple of it
ENDS = ("accuracy", "seconds_so_far", "seconds_communicating_so_far", "bytes_so_far_per_rank")
"""Fields of the last epoch that a table shows."""
Lines = list[dict[str, Any]]
"""What a run wrote: the links, and its epochs."""


def run(folder: Path, fresh: bool) -> list[str]:
    """Make the missing runs; returns the failures."""
    failed = []
    for cluster in CLUSTERS:
        missing = {method: _path(folder, cluster, method) for method in METHODS}
        missing = {method: path for method, path in missing.items() if fresh or not _complete(path)}
        if not missing:
            continue
        try:
            with set_up_cluster(cluster) as (network, scratch, carried):
                links = {"kind": "links", "links": carried}
                for method, path in missing.items():
                    log(f"training: {cluster.links}, {method}")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    arguments = ["-m", "apps.train", *SETTINGS, *METHODS[method], "--json", str(path.resolve())]
                    what = f"training of {method} on {cluster.name}"
                    run_on_hosts(network, scratch, what, arguments, LONGEST_JOB_S, settings=DYNAMIC_RULES)
                    path.write_text(json.dumps(links) + "\n" + path.read_text())
        except FAILURES as error:
            failed.append(f"training, {cluster.name}: {error}")
    return failed


def records(folder: Path) -> dict[Cluster, dict[str, Lines]]:
    """The lines of every complete run."""
    found = {cluster: {method: _path(folder, cluster, method) for method in METHODS} for cluster in CLUSTERS}
    return {
        cluster: {method: read_run(path) for method, path in paths.items() if _complete(path)}
        for cluster, paths in found.items()
    }


def summaries(found: dict[Cluster, dict[str, Lines]]) -> list[dict[str, Any]]:
    """The end of every run, and the seconds to the accuracy that the worst run ends with; a record for each rate."""
    made = []
    for cluster, runs in found.items():
        if runs:
            epochs = {method: [line for line in lines if line["kind"] == "epoch"] for method, lines in runs.items()}
            goal = int(min(lines[-1]["accuracy"] for lines in epochs.values()) / STEP) * STEP
            rows = [
                {"method": method, "to_goal_s": seconds_to(goal, lines), **{key: lines[-1][key] for key in ENDS}}
                for method, lines in epochs.items()
            ]
            made.append({"settings": asdict(cluster), "goal": goal, "epochs": EPOCHS, "rows": rows})
    return made


def render(found: dict[Cluster, dict[str, Lines]]) -> str:
    """A table for each rate."""
    texts = []
    for record in summaries(found):
        cluster, goal = Cluster(**record["settings"]), record["goal"]
        columns: Sequence[Column] = (
            ("method", get("method")),
            (f"seconds to {goal:.1%}", lambda row: ABSENT if row["to_goal_s"] is None else f"{row['to_goal_s']:.0f}"),
            (f"accuracy after {EPOCHS} epochs", get("accuracy", ".2%")),
            ("seconds", get("seconds_so_far", ".0f")),
            ("of them communicating", get("seconds_communicating_so_far", ".0f")),
            ("MB sent by a rank", lambda row: f"{row['bytes_so_far_per_rank'] / 1e6:.4g}"),
        )
        rates = _rates(found[cluster].values())
        texts.append(f"**4 nodes, {cluster.links}**\n\n{table(columns, record['rows'])}{rates}")
    return "\n\n".join(texts) or NOTHING


def _rates(runs: Iterable[Lines]) -> str:
    """Return the rate of the slowest link before the runs."""
    slowest = [min(link["bits_per_s"] for link in lines[0]["links"]) for lines in runs]
    ends = dict.fromkeys(str(Rate(round(rate, -5))) for rate in (min(slowest), max(slowest)))
    return f"\n\n<sub>Payload that the slowest link carried before: {' to '.join(ends)}.</sub>"


def seconds_to(goal: float, epochs: Sequence[dict[str, Any]]) -> float | None:
    """Training seconds until the accuracy is reached, on straight lines between the ends of epochs; None: never."""
    before = {"seconds_so_far": 0.0, "accuracy": 0.0}
    for epoch in epochs:
        if epoch["accuracy"] >= goal:
            part = (goal - before["accuracy"]) / (epoch["accuracy"] - before["accuracy"])
            return float(before["seconds_so_far"] + part * (epoch["seconds_so_far"] - before["seconds_so_far"]))
        before = epoch
    return None


def _path(folder: Path, cluster: Cluster, method: str) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in method.lower())
    return folder / f"{cluster.name}-{name}.json"


def _complete(path: Path) -> bool:
    lines = path.read_text().splitlines() if path.exists() else []
    return bool(lines) and json.loads(lines[-1])["kind"] == "result"
