"""Draw runs of split learning: test accuracy against rounds, and against the bytes that were sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apps.figure_style import looks_of
from apps.plotting import headline, name_lines, new_figure, save, unit_ticks
from apps.records import Record

FULL_PRECISION = "float32"
METHODS = {"directq": "DirectQ", "aq-sgd": "AQ-SGD"}


def draw(runs: Sequence[Record], path: Path) -> Path:
    """Test accuracy of each run."""
    figure, ((by_round,), (by_bytes,)) = new_figure(1, 2, height=5.6)
    looks = looks_of(map(called, runs))
    for run in runs:
        rounds, name = run["rounds"], called(run)
        look = {"color": looks[name].color, "linestyle": looks[name].linestyle, "label": name}
        accuracy = [100 * each["test_accuracy"] for each in rounds]
        by_round.plot([each["round"] for each in rounds], accuracy, **look)
        by_bytes.plot(_sent(run), accuracy, **look)
    by_round.set(xlabel="round", ylabel="test accuracy, %")
    by_bytes.set(xlabel="bytes between clients and server", ylabel="test accuracy, %", xscale="log")
    unit_ticks(by_bytes.xaxis, "B")
    name_lines(by_round)
    options = runs[0]["options"]
    images, kept = options["dataset"] or "images", options["kept"]
    note = (
        f"Split learning with {options['clients']} clients on {images}, one seed. Bits: of activations on the way to "
        f"the server. Of the gradients, {100 * kept:.0f} % travel back in {options['backward_bits']} bits."
    )
    headline(figure, finding(runs), note)
    return save(figure, path)


def called(run: Record) -> str:
    """Name of a run in figures: its method and the bits of its activations."""
    method, bits = run["options"]["method"], run["options"]["forward_bits"]
    return FULL_PRECISION if method == "fp32" else f"{METHODS[method]}, {bits} bits"


def finding(runs: Sequence[Record]) -> str:
    """The title: accuracy and bytes of the compressed run that ends best, next to those of float32."""
    ends = {called(run): (100 * run["rounds"][-1]["test_accuracy"], float(_sent(run)[-1])) for run in runs}
    others = {name: end for name, end in ends.items() if name != FULL_PRECISION}
    if not others or FULL_PRECISION not in ends:
        return "Test accuracy after the last round: " + ", ".join(
            f"{name} {end[0]:.1f} %" for name, end in ends.items()
        )
    best = min(others, key=lambda name: (round(-others[name][0], 1), others[name][1]))
    exact, (accuracy, sent) = ends[FULL_PRECISION], others[best]
    return (
        f"{best.replace(', ', ' in ')} ends with {accuracy:.1f} % accuracy, float32 with {exact[0]:.1f} %, "
        f"and sends {exact[1] / sent:.0f} times fewer bytes"
    )


def _sent(run: Record) -> list[float]:
    found: list[float] = np.cumsum([each["bytes_up"] + each["bytes_down"] for each in run["rounds"]]).tolist()
    return found
