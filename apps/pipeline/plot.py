"""Draw runs: losses against epochs and against the bytes that were sent between stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apps.figure_style import looks_of
from apps.plotting import headline, name_lines, new_figure, save, unit_ticks
from apps.records import Record


def draw(records: Sequence[Record], path: Path) -> Path:
    """Training and validation loss of each run."""
    figure, ((by_epoch,), (by_bytes,)) = new_figure(1, 2, height=5.6)
    looks = looks_of(record["name"] for record in records)
    ends = {}
    for record in records:
        epochs, look = record["epochs"], looks[record["name"]]
        if not epochs:
            continue
        sent = np.cumsum([each["bytes_forward"] + each["bytes_backward"] for each in epochs])
        validation = [each["validation_loss"] for each in epochs]
        by_epoch.plot([each["epoch"] for each in epochs], validation, label=record["name"], **look._asdict())
        by_bytes.plot(sent, validation, label=record["name"], **look._asdict())
        steps = np.linspace(0, len(epochs), len(record["losses"]) + 1)[1:]
        by_epoch.plot(steps, record["losses"], color=look.color, alpha=0.25, linewidth=0.8)
        ends[record["name"]] = validation[-1]
    by_epoch.set(xlabel="epoch (pale: training, each step)", ylabel="loss, nats a character")
    by_bytes.set(xlabel="bytes between stages", ylabel="validation loss, nats a character", xscale="log")
    unit_ticks(by_bytes.xaxis, "B")
    for axes in (by_epoch, by_bytes):
        name_lines(axes)
    shown = ", ".join(f"{name} {loss:.3f}" for name, loss in ends.items())
    headline(figure, f"Validation loss after the last epoch: {shown}" if ends else "No run finished an epoch")
    return save(figure, path)
