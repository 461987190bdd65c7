"""Figure 5: activations and gradients of the model both travel in few bits, on a grid of replicas and stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from apps.plotting import Curve, curves
from apps.reproduce.aq_sgd.runs import FP32, SAME, by_epoch, gap, how_many, losses, mean_gap, trained
from apps.reproduce.claims import Claim
from apps.studies.results import Results

GRID = replace(FP32, stages=2, replicas=2, batch=8, micro_batches=2)
MOST = 0.06


def figure_5(results: Results, seeds: int, full: bool, quick: bool = False) -> tuple[list[Claim], list[Path]]:
    """Train on 2 replicas of 2 stages: float32, and 3, 6 and 4 bits by AQ-SGD and by DirectQ."""
    many = how_many(seeds, full, quick)
    few = replace(GRID, forward_bits=3, backward_bits=6, gradient_bits=4)
    runs = {
        "fp32, grid": GRID,
        "AQ-SGD fw3 bw6 and 4-bit Adam": few,
        "DirectQ fw3 bw6 and 4-bit Adam": replace(few, direct=True),
        "fp32 and 4-bit Adam": replace(GRID, gradient_bits=4),
    }
    found = trained(results, runs, many, quick)
    full_precision, ours, direct, adam = found.values()
    differs = f"{SAME}, {many} seeds, 2 stages x 2 replicas, OneBitAdam with 4 bits after one epoch"
    lines = [Curve(name, range(1, len(records[0]["epochs"]) + 1), by_epoch(records)) for name, records in found.items()]
    picture = curves(results.folder / "both.png", lines, "epoch", "validation loss, nats a character")
    return [
        Claim(
            "Fig. 5a",
            "AQ-SGD with compressed gradients converges well",
            "near float32",
            f"{np.mean(losses(ours)):.4f} against {np.mean(losses(full_precision)):.4f} nats: "
            f"{gap(ours, full_precision)}; 4-bit Adam alone {mean_gap(adam, full_precision):+.4f}",
            gap(ours, full_precision).most <= MOST,
            f"{differs}; judged: surely at most {MOST} nats above",
        ),
        Claim(
            "Fig. 5a",
            "DirectQ with compressed gradients ends worse",
            "much worse",
            f"{mean_gap(direct, full_precision):+.4f} nats above float32; above AQ-SGD {gap(direct, ours)}",
            gap(direct, ours).above,
            differs,
        ),
    ], [picture]
