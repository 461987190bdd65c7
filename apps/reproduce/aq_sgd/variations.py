"""Figure 9: the number of stages, the bits of the messages that are kept, and the bits that travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.aq_sgd.convergence import methods
from apps.reproduce.aq_sgd.runs import FP32, SAME, by_epoch, how_many, losses, mean_gap, trained
from apps.reproduce.claims import Claim
from apps.reproduce.results import Results

STAGES, STORED = (2, 4), (2, 4, 8)
MOST = 0.06
OURS = "AQ-SGD fw3 bw6"


def figure_9(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Vary one thing at a time, and compare the last validation losses with float32's."""
    many = how_many(seeds, full)
    ours = replace(FP32, forward_bits=3, backward_bits=6)
    runs = {f"{stages} stages": replace(ours, stages=stages) for stages in STAGES if stages != FP32.stages}
    runs |= {f"messages kept in {bits} bits": replace(ours, stored_bits=bits) for bits in STORED}
    found = methods(results, many) | trained(results, runs, many)
    found[f"{FP32.stages} stages"] = found[OURS]
    differs = f"{SAME}, {many} seeds, fw3 bw6"
    gaps = {name: mean_gap(records, found["fp32"]) for name, records in found.items()}
    stages = [f"{count} stages" for count in STAGES]
    stored = [f"messages kept in {bits} bits" for bits in STORED]
    return [
        Claim(
            "Fig. 9a",
            "more stages, and so more cuts, do no harm",
            "curves lie on each other",
            ", ".join(f"{gaps[name]:+.4f} nats above float32 with {name}" for name in stages),
            max(gaps[name] for name in stages) <= MOST,
            f"{differs}; judged: at most {MOST} nats above float32",
        ),
        Claim(
            "Fig. 9b",
            "messages kept in few bits do no harm",
            "8 bits as good as float32, fewer worse",
            ", ".join(f"{gaps[name]:+.4f} nats with {name}" for name in stored)
            + f"; {gaps[OURS]:+.4f} kept in float32",
            gaps[stored[-1]] <= MOST,
            f"{differs}; judged: 8 bits, at most {MOST} nats above float32",
        ),
    ], [_draw(results, name, {key: found[key] for key in keys})
        for name, keys in (("stages", ("fp32", *stages)), ("stored", ("fp32", OURS, *stored)))]  # fmt: skip


def _draw(results: Results, name: str, found: Mapping[str, list[Record]]) -> Path:
    lines = [
        Curve(
            f"{method}, {np.mean(losses(records)):.3f}",
            range(1, FP32.epochs + 1),
            by_epoch(records),
        )
        for method, records in found.items()
    ]
    return curves(results.folder / f"{name}.png", lines, "epoch", "validation loss, nats a character")
