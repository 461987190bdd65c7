"""ECQ-SGD (Wu et al., ICML 2018, arXiv 1806.08054): Figure 2, Tables 1 and 2, and the compression it states.

The generators of the data are in `linear_models`. All methods of a study see the same data and the same
samples at each seed, so that differences between them can be paired.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from apps.plotting import Curve, curves
from apps.reproduce.claims import Claim, paired
from apps.reproduce.ecq_sgd.residual import residual, sizes, table_2
from apps.reproduce.ecq_sgd.studies import ALPHAS, BATCH, BETAS, RANKS, SYN, Found, cell, ends, one_seed, studies
from apps.studies.parallel import run_parallel
from apps.studies.results import Results

SAVED = 0.9
"""Part of the paper's savings that counts as reproduced."""
AXES = {"loss": "loss over all samples", "distance": "distance to w*"}


def study(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Train everything, then judge and draw."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the processes are the parallel part
    steps, every = 3000 if full else 1000, studies()
    of_seeds = {one.name: range(min(seeds, one.most_seeds)) for one in every}
    rows = run_parallel(
        {(one.name, seed): partial(one_seed, results, one, seed, steps) for one in every for seed in of_seeds[one.name]}
    )
    made: dict[str, Found] = {
        one.name: {name: [rows[one.name, seed][name] for seed in of_seeds[one.name]] for name in one.methods}
        for one in every
    }
    differs = f"generated data; {RANKS} ranks, {BATCH} samples each, {steps} steps"
    claims = [figure_2(features, made[f"syn-{features}"], differs) for features in SYN]
    for name in PAPER:
        claims += table_1(name, made[name], differs)
    claims += [*table_2(made["grid"], differs), residual(results), *sizes(results)]
    return claims, [path for name, found in made.items() for path in draw(results.folder, name, found)]


PARTS = (study,)


def figure_2(features: int, found: Found, differs: str) -> Claim:
    """Check whether the distances to the optimum are in the order dense <= ECQ-SGD < QSGD."""
    distance = {name: ends(records, "distance") for name, records in found.items()}
    gain, cost = paired(distance["ECQ-SGD"], distance["QSGD"]), paired(distance["ECQ-SGD"], distance["dense"])
    means = ", ".join(f"{name} {np.mean(values):.3g}" for name, values in distance.items())
    return Claim(
        "Fig. 2",
        f"distance to w* on Syn-{features}: dense ≤ ECQ-SGD < QSGD",
        "curves",
        f"{means}; ECQ-SGD − QSGD {gain}, ECQ-SGD − dense {cost}",
        gain.below and not cost.below,
        f"{differs}, {len(found['dense'])} seeds",
    )


@dataclass(frozen=True)
class Row:
    """A row of Table 1 in the paper; `verdict` is its statement about the loss."""

    loss: str
    ratio: str
    verdict: Literal["", "as good as dense", "worse than dense"] = ""


PAPER = {
    "regression": {
        "1-bit SGD": Row("6.57e3", "19.07x", "worse than dense"),
        "TernGrad": Row("5.04e3", "20.43x", "as good as dense"),
        "QSGD": Row("5.11e3", "24.63x", "as good as dense"),
        "ECQ-SGD": Row("5.00e3", "23.62x", "as good as dense"),
        "dense": Row("4.99e3", "1x"),
    },
    "classification": {
        "1-bit SGD": Row("0.147", "61.75x", "worse than dense"),
        "TernGrad": Row("0.116", "34.67x", "as good as dense"),
        "QSGD": Row("0.148", "272.18x", "worse than dense"),
        "ECQ-SGD": Row("0.116", "281.88x", "as good as dense"),
        "dense": Row("0.116", "1x"),
    },
}


def table_1(name: str, found: Found, differs: str) -> list[Claim]:
    """Check losses against dense and savings as in the paper, and lengths of messages against the formula."""
    dense = ends(found["dense"], "loss")
    full_bits, claims, lengths, savings = found["dense"][0]["bits"], [], {}, {}
    for method, row in PAPER[name].items():
        mine, bits = ends(found[method], "loss"), float(np.mean([record["bits"] for record in found[method]]))
        lengths[method] = bits / float(np.mean([record["formula"] for record in found[method]])) - 1
        if not row.verdict:
            continue
        more, savings[method] = paired(mine, dense), full_bits / bits
        claims.append(
            Claim(
                "Table 1",
                f"{method} on the {name}: {row.verdict}",
                f"loss {row.loss}, dense {PAPER[name]['dense'].loss}",
                f"loss {np.mean(mine):.4g}, dense {np.mean(dense):.4g}; by seed {more}",
                more.above != (row.verdict == "as good as dense"),
                f"{differs}, {len(dense)} seeds; worse: surely above dense, paired by seed; as good: not so",
            )
        )
    claims.append(saved(name, savings))
    claims.append(
        Claim(
            "Table 1",
            f"bits on the {name} are within 5 % of the formula",
            "entropy-coded",
            ", ".join(f"{method} {100 * off:+.1f} %" for method, off in lengths.items()),
            max(map(abs, lengths.values())) <= 0.05,
            "1-bit SGD and TernGrad are not entropy-coded here; the formula is that on the pages of the methods, with "
            "norms, frequencies and the entropy of the codes in each message",
        )
    )
    return claims


def saved(name: str, savings: Mapping[str, float]) -> Claim:
    """Check how many times shorter than float32 the messages of each method are."""
    return Claim(
        "Table 1",
        f"messages on the {name} are as many times shorter than float32",
        ", ".join(f"{method} {PAPER[name][method].ratio}" for method in savings),
        ", ".join(f"{method} {ratio:.1f}x" for method, ratio in savings.items()),
        all(ratio >= SAVED * float(PAPER[name][method].ratio[:-1]) for method, ratio in savings.items()),
        f"1-bit SGD and TernGrad are not entropy-coded here; judged: each at least {SAVED:g} of the paper's",
    )


def draw(folder: Path, name: str, found: Found) -> list[Path]:
    """Draw the curves of a study."""
    if name == "grid":
        parts: dict[str, Sequence[str]] = {
            "grid-beta": ["QSGD", *(cell(0.01, beta) for beta in BETAS)],
            "grid-alpha": ["QSGD", *(cell(alpha, 1.0) for alpha in ALPHAS)],
        }
        kinds = ["distance"]
    else:
        parts, kinds = {name: list(found)}, list(AXES) if name.startswith("syn") else ["loss"]
    paths = []
    for part, methods in parts.items():
        for what in kinds:
            lines = [Curve(key, found[key][0]["steps"], [record[what] for record in found[key]]) for key in methods]
            paths.append(curves(folder / f"{part}-{what}.png", lines, "step", AXES[what], log=True))
    return paths
