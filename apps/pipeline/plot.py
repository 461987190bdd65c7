"""Draw runs: losses against epochs and against the bytes that were sent between stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apps.plotting import legend, new_figure, save
from apps.records import Record

MB = 1e6


def draw(records: Sequence[Record], path: Path) -> Path:
    """Training and validation loss of each run."""
    figure, axes = new_figure(2, size=(9, 3.8))
    handles = []
    for number, record in enumerate(records):
        epochs = record["epochs"]
        if not epochs:
            continue
        sent = np.cumsum([each["bytes_forward"] + each["bytes_backward"] for each in epochs]) / MB
        validation = [each["validation_loss"] for each in epochs]
        (line,) = axes[0][0].plot(
            [each["epoch"] for each in epochs], validation, color=f"C{number}", marker="o", label=record["name"]
        )
        handles.append(line)
        axes[0][1].plot(sent, validation, color=f"C{number}", marker="o")
        steps = np.linspace(0, len(epochs), len(record["losses"]) + 1)[1:]
        axes[0][0].plot(steps, record["losses"], color=f"C{number}", alpha=0.25, linewidth=0.8)
    axes[0][0].set_xlabel("epoch (pale: training, each step)")
    axes[0][1].set_xlabel("MB sent between stages")
    axes[0][1].set_xscale("log")
    axes[0][0].set_ylabel("loss, nats a character")
    if handles:
        legend(figure, handles)
    return save(figure, path)
