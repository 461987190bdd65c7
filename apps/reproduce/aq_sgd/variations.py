"""Figure 9: the number of stages, the bits of messages that are kept, and rounding, about the paper's default.

The default is 4 stages and 2 bits forward, 4 backward. The model has 8 blocks, so that it can be cut into 8 stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from apps.pipeline.options import Options
from apps.plotting import Curve, panels
from apps.records import Record
from apps.reproduce.aq_sgd.runs import FP32, MOST, PRETRAINED, by_epoch, gap, how_many, losses, shrink, trained
from apps.reproduce.claims import Claim, Difference
from apps.studies.results import Results

STAGES, STAGES_FULL, STORED = (4, 8), (2, 4, 8), (2, 8)
DEEP_PRETRAINED = replace(PRETRAINED, layers=STAGES[-1], epochs=3, characters=100_000)
DEEP = replace(
    FP32, layers=STAGES[-1], characters=12_000, skip=DEEP_PRETRAINED.characters, micro_batches=2,
    forward_bits=2, backward_bits=4,
)  # fmt: skip
PREFIX = "deep, "
FEW, STOCHASTIC = "fw2 bw4", "AQ-SGD fw4 bw8, stochastic"
OURS, DIRECT = f"AQ-SGD {FEW}, {DEEP.stages} stages", f"DirectQ {FEW}, {DEEP.stages} stages"
LOST = MOST[2, 4]
"""Nats above float32 that count as none."""


def deep(
    results: Results, seeds: int, quick: bool, runs: Mapping[str, Options] | None = None
) -> dict[str, list[Record]]:
    """The records of the default, of DirectQ with as many bits, of float32, and of other `runs`, by seed."""
    plan = {
        "fp32": replace(DEEP, stages=1, forward_bits=FP32.forward_bits, backward_bits=FP32.backward_bits),
        DIRECT: replace(DEEP, direct=True),
        OURS: DEEP,
    }
    return trained(results, plan | dict(runs or {}), seeds, quick, DEEP_PRETRAINED, PREFIX)


def figure_9(results: Results, seeds: int, full: bool, quick: bool = False) -> tuple[list[Claim], list[Path]]:
    """Vary one thing at a time, and compare the last validation losses."""
    many, stages = how_many(seeds, full, quick), STAGES_FULL if full else STAGES
    runs = {
        f"{method} {FEW}, {count} stages": replace(DEEP, stages=count, direct=direct)
        for count in stages
        for method, direct in (("DirectQ", True), ("AQ-SGD", False))
    }
    runs |= {f"AQ-SGD {FEW}, kept in {bits} bits": replace(DEEP, stored_bits=bits) for bits in STORED}
    drawn = replace(DEEP, forward_bits=4, backward_bits=8, rounding="stochastic")
    runs[STOCHASTIC] = drawn
    runs |= {f"{STOCHASTIC}, kept in {bits} bits": replace(drawn, stored_bits=bits) for bits in STORED}
    found = deep(results, many, quick, runs)
    shown = shrink(DEEP, quick)
    differs = (
        f"character model of {DEEP.layers} blocks of width {DEEP.width}, fine-tuned on {shown.characters // 1000} "
        f"thousand characters, {shown.epochs} epochs, {many} seeds; there DeBERTa-base on QNLI and CoLA"
    )
    return [
        *_of_stages(found, stages, differs),
        *_of_kept_messages(found, f"{differs}; {DEEP.stages} stages"),
        *_of_rounding(found, f"{differs}; {DEEP.stages} stages"),
    ], [_draw(results, found, stages, shown.epochs)]


def _gaps(found: Mapping[str, list[Record]], names: Mapping[str, str], to: str) -> dict[str, Difference]:
    """Differences of the last losses to those of the run `to`, by the labels of the others."""
    return {shown: gap(found[name], found[to]) for shown, name in names.items()}


def _listed(gaps: Mapping[str, Difference]) -> str:
    return ", ".join(f"{one} with {shown}" for shown, one in gaps.items())


def _of_stages(found: Mapping[str, list[Record]], counts: Sequence[int], differs: str) -> list[Claim]:
    ours, direct = (
        _gaps(found, {f"{count} stages": f"{method} {FEW}, {count} stages" for count in counts}, "fp32")
        for method in ("AQ-SGD", "DirectQ")
    )
    fewest, most = (f"DirectQ {FEW}, {count} stages" for count in (counts[0], counts[-1]))
    grown = gap(found[most], found[fewest])
    return [
        Claim(
            "Fig. 9a, b",
            f"AQ-SGD {FEW} stays near float32 with up to {counts[-1]} stages",
            "curves lie on each other",
            f"above float32's {np.mean(losses(found['fp32'])):.4f} nats: {_listed(ours)}",
            all(one.most <= LOST for one in ours.values()),
            f"{differs}; judged: surely at most {LOST} nats above float32",
        ),
        Claim(
            "Fig. 9a, b",
            f"DirectQ {FEW} gets worse with more stages",
            "not bad with 2 stages, unsatisfactory with more",
            f"above float32: {_listed(direct)}; {counts[-1]} stages less {counts[0]} {grown}",
            grown.above,
            differs,
        ),
    ]


def _of_kept_messages(found: Mapping[str, list[Record]], differs: str) -> list[Claim]:
    few, many = (f"AQ-SGD {FEW}, kept in {bits} bits" for bits in STORED)
    above = _gaps(found, {f"{bits} bits": f"AQ-SGD {FEW}, kept in {bits} bits" for bits in STORED}, OURS)
    worse, drop = above.values()
    direct = gap(found[DIRECT], found[few])
    return [
        Claim(
            "Fig. 9e, f",
            f"no significant loss where messages are kept in {STORED[-1]} bits",
            "no significant drop",
            f"{drop} nats to messages kept in float32, {gap(found[many], found['fp32'])} to training in float32",
            drop.most <= MOST[4, 8],
            f"{differs}; judged: surely at most {MOST[4, 8]} nats above messages in float32",
        ),
        Claim(
            "Fig. 9e, f",
            f"messages kept in {STORED[0]} bits are slightly worse",
            "slightly worse than the default",
            f"{worse} nats to messages kept in float32",
            worse.above,
            differs,
        ),
        Claim(
            "Fig. 9e, f",
            f"with messages kept in {STORED[0]} bits AQ-SGD is still better than DirectQ",
            "significantly better",
            f"DirectQ less AQ-SGD {direct} nats",
            direct.above,
            differs,
        ),
    ]


def _of_rounding(found: Mapping[str, list[Record]], differs: str) -> list[Claim]:
    names = {"messages kept in float32": STOCHASTIC}
    names |= {f"{bits} bits": f"{STOCHASTIC}, kept in {bits} bits" for bits in STORED}
    gaps = _gaps(found, names, "fp32")
    return [
        Claim(
            "Theorem 3.1",
            "with unbiased rounding, fw4 bw8, AQ-SGD converges as float32, however messages are kept",
            "the same rate; Q is to be unbiased",
            f"above float32: {_listed(gaps)}",
            all(one.most <= LOST for one in gaps.values()),
            f"{differs}; messages that travel are rounded stochastically, and those that are kept to the nearest "
            f"value, as both ends must keep the same; judged: surely at most {LOST} nats above float32",
        )
    ]


def _draw(results: Results, found: Mapping[str, list[Record]], stages: Sequence[int], epochs: int) -> Path:
    def curves(*names: str) -> list[Curve]:
        return [
            Curve(f"{name}: {np.mean(losses(found[name])):.3f}", range(1, epochs + 1), by_epoch(found[name]))
            for name in names
        ]

    grid = [
        [
            ("AQ-SGD, stages", curves("fp32", *(f"AQ-SGD {FEW}, {count} stages" for count in stages))),
            ("DirectQ, stages", curves("fp32", *(f"DirectQ {FEW}, {count} stages" for count in stages))),
            ("messages kept", curves("fp32", OURS, *(f"AQ-SGD {FEW}, kept in {bits} bits" for bits in STORED))),
            ("stochastic rounding",
             curves("fp32", STOCHASTIC, *(f"{STOCHASTIC}, kept in {bits} bits" for bits in STORED))),
        ]
    ]  # fmt: skip
    return panels(results.folder / "variations.png", grid, "epoch", "validation loss, nats a character", legends=True)
