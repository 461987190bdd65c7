"""The advice as lines of a program, to be copied."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from collectives import TOPOLOGIES
from mpicomp.algorithms import Algorithm, Dense
from mpicomp.cli.advise.choice import Choice
from mpicomp.cli.advise.request import METHODS


def lines_to_copy(record: dict[str, Any], choice: Choice) -> list[str]:
    """The lines that use the advice with PyTorch, and what takes the place of the last without it."""
    row = choice.row if choice.compress else _dense(record)
    method = METHODS[row["method"]] if choice.compress else Dense()
    topology = row["topology"]
    named = topology.partition(":")[0] in (*TOPOLOGIES, "mpi")  # a method's own route has no name to choose it by
    kind = record["dtype"]
    dtype = "" if kind == "float32" else f', dtype="{kind}"'
    where = [f'topology="{topology}"'] if named else []
    if record["threads"] > 1:
        where.append(f"threads={record['threads']}")
    return [
        "import mpicomp.torch",
        f"comm, method = mpicomp.Communicator({', '.join(where)}), {expression(method)}",
        "optimizer = mpicomp.torch.DistributedOptimizer(optimizer, method, comm, model.named_parameters())",
        f"# or, without PyTorch: aggregator = method.start(comm, {record['count']}{dtype})",
    ]


def expression(method: Algorithm) -> str:
    """The method as Python makes it, without the options that have their defaults."""
    options = ((field.name, field.default, getattr(method, field.name)) for field in fields(method))  # type: ignore[arg-type]
    given = ", ".join(f"{name}={value!r}" for name, default, value in options if value != default)
    return f"mpicomp.{type(method).__name__}({given})"


def _dense(record: dict[str, Any]) -> dict[str, Any]:
    """The fastest dense sum."""
    found = [row for row in record["rows"] if row["method"] == "dense"]
    if record["mpi_s"] is not None:
        found.append({"topology": "mpi", "seconds": record["mpi_s"]})
    return min(found, key=lambda row: float(row["seconds"]))
