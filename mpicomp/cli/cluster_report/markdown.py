"""Reports as Markdown: a page of one cluster, and the facts that a table of several ones is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpicomp.cli.cluster_report.validation import COMPRESSED

SKIPPED = {"memory": "too little memory", "time": "no time", "no torch": "PyTorch is not installed"}
Report = Mapping[str, Any]


def machine(report: Report) -> str:
    """Return processors, cores, memory and GPUs of a node."""
    found = report["machine"]
    gpus = "".join(f", {one['count']} {one['name']}" for one in found["gpus_per_node"])
    return (
        f"{' and '.join(found['cpus'])}, {found['cores_per_node']:g} cores, {found['memory_gb_per_node']:.0f} GB{gpus}"
    )


def ranks(report: Report) -> str:
    """Return ranks on nodes, such as "4 x 2" for four nodes of two ranks."""
    each = report["ranks_per_node"]
    return f"{len(each)} x {each[0]}" if len(set(each)) == 1 else " + ".join(map(str, each))


def links(report: Report) -> str:
    """Return the latency and the rate of a rank's link to the slowest neighbour."""
    link = report["network"]
    latency_s = link["between_latency_s"] or link["latency_s"]
    rate = link["uplink_bytes_s"] or link["bandwidth_bytes_s"]
    return f"{1e6 * latency_s:.1f} us, {8 * rate / 1e9:.2f} Gbit/s"


def cells(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the median of each call of a size, in brackets how many times as fast as the best dense one."""
    median = {call["name"]: call["median_s"] for call in entry["calls"]}
    return {
        name: f"{milliseconds(one)} ({median[entry['best_dense']] / one:.2f})"
        if name in COMPRESSED
        else milliseconds(one)
        for name, one in median.items()
    }


def milliseconds(seconds: float) -> str:
    """Return milliseconds with three digits."""
    return f"{1e3 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def page(report: Report) -> str:
    """Return the page of a report."""
    versions, mpi = report["versions"], report["mpi"]
    columns = {f"{entry['bytes'] / 1e6:g} MB": entry for entry in report["allreduce"]}
    found = {size: cells(entry) for size, entry in columns.items() if not entry["skipped"]}
    names = list(dict.fromkeys(name for column in found.values() for name in column))
    training = report["training"]
    return "\n".join(
        [
            f"# Report of {ranks(report)} ranks (nodes x ranks of a node)",
            "",
            f"- Nodes: {machine(report)}; load per core before the start {report['machine']['load_per_core']:g}",
            f"- {mpi['library']} {mpi['version']}, "
            + ", ".join(f"{name} {one}" for name, one in versions.items() if one is not None),
            f"- Links: {links(report)}",
            f"- Measured on {report['date']}, in {report['took_seconds']:.0f} s",
            *(f"- {size}: {SKIPPED[entry['skipped']]}" for size, entry in columns.items() if entry["skipped"]),
            "",
            "All-reduce of float32, median in ms; in brackets: how many times as fast as the best dense one.",
            "",
            f"| | {' | '.join(found)} |",
            f"|---|{'---:|' * len(found)}",
            *(f"| {name} | {' | '.join(column.get(name, '–') for column in found.values())} |" for name in names),
            "",
            f"Training step of {training['parameters'] / 1e6:.1f} million parameters, median in ms: "
            + (
                SKIPPED.get(training["skipped"], training["skipped"])
                if training["skipped"]
                else ", ".join(f"{step['name']} {milliseconds(step['median_s'])}" for step in training["steps"])
            ),
            "",
        ]
    )
