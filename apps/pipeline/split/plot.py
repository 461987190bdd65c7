"""Draw runs of split learning: loss and accuracy against rounds, and accuracy against the bytes that were sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apps.plotting import legend, new_figure, save
from apps.records import Record

MB = 1e6


def draw(runs: Sequence[Record], path: Path) -> Path:
    """Training loss and test accuracy of each run."""
    figure, ((losses, accuracies, against_bytes),) = new_figure(3, size=(11, 3.6), sharey=False)
    for run in runs:
        rounds = run["rounds"]
        numbers = [each["round"] for each in rounds]
        accuracy = [each["test_accuracy"] for each in rounds]
        sent = np.cumsum([each["bytes_up"] + each["bytes_down"] for each in rounds]) / MB
        losses.plot(numbers, [each["loss"] for each in rounds], label=run["name"])
        accuracies.plot(numbers, accuracy)
        against_bytes.plot(sent, accuracy)
    losses.set(xlabel="round", ylabel="training loss")
    accuracies.set(xlabel="round", ylabel="test accuracy")
    against_bytes.set(xlabel="MB between clients and server", ylabel="test accuracy", xscale="log")
    for axes in (losses, accuracies, against_bytes):
        axes.grid(alpha=0.3)
    legend(figure, losses.get_lines())
    return save(figure, path)
