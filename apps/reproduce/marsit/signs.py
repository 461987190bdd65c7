"""Figure 1b of Marsit: the fraction of a result's signs that are those of the exact mean."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim
from apps.reproduce.marsit.perceptron import Perceptron, garments
from apps.studies.results import Results
from collectives import Communicator
from collectives.threads.run_local import run_local
from mpicomp import SSDM, CascadingSSDM, MajorityVote, Marsit
from mpicomp.algorithms import Algorithm
from mpicomp.diagnostics import matching_rate

RANKS = (2, 3, 4, 6, 8)
GAUSSIAN_N, VECTORS = 78_000, 5
MODEL, BATCH, LR, SPACING = Perceptron(196, 64, 10), 16, 0.03, 60
METHODS: dict[str, Algorithm] = {
    "cascading": CascadingSSDM(),
    "SSDM, counted": SSDM(),
    "Marsit": Marsit(None, compensation=False, global_step=1.0),
    "majority vote": MajorityVote(),
}
SOURCES = ("Gaussian vectors", "gradients")


def figure_1b(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Compare signs of independent Gaussian vectors, and of the gradients of a perceptron in training."""
    claims, figures = [], []
    for source in SOURCES:
        name = f"figure-1b-{source.split()[0].lower()}"
        settings = {"ranks": [*RANKS], "vectors": VECTORS, "methods": repr(METHODS), "source": source}
        settings |= {"n": GAUSSIAN_N} if source == SOURCES[0] else {"model": repr(MODEL), "spacing": SPACING}
        settings["measured"] = ["rates", "lengths"]
        found = results.get(name, settings, partial(measure, source))
        rates, lengths = found["rates"], found["lengths"]
        lines = [Curve(method, RANKS, (100 * np.transpose(rates[method])).tolist()) for method in METHODS]
        figures.append(curves(results.folder / f"{name}.png", lines, "ranks M", "signs as those of the exact mean, %"))
        claims.append(_claim(source, {method: 100 * np.mean(of_one, axis=1) for method, of_one in rates.items()}))
        claims.append(_lengths(source, {method: np.mean(of_one, axis=1) for method, of_one in lengths.items()}))
    return claims, figures


def measure(source: str) -> Record:
    """Fractions of matching signs, and lengths, by method: a row for each number of ranks, a column for each vector."""
    rows = gaussian() if source == SOURCES[0] else gradients()
    of_ranks = [compare(rows, ranks) for ranks in RANKS]
    return {
        what: {name: [[pair[number] for pair in found[name]] for found in of_ranks] for name in METHODS}
        for number, what in enumerate(("rates", "lengths"))
    }


def gaussian() -> NDArray[np.float32]:
    """Independent normal vectors: float32[vectors, most ranks, n]."""
    return np.random.default_rng(7).standard_normal((VECTORS, max(RANKS), GAUSSIAN_N), np.float32)


def gradients() -> NDArray[np.float32]:
    """Gradients of the batches of all ranks, in the course of dense training: float32[vectors, most ranks, n]."""
    images, rng, w = garments(), np.random.default_rng(8), MODEL.initial(0)
    rows, kept = np.zeros((max(RANKS), MODEL.n), np.float32), []
    for step in range(1, VECTORS * SPACING + 1):
        for row in rows:
            chosen = rng.integers(0, len(images.y), BATCH)
            MODEL.gradient(w, images.x[chosen], images.y[chosen], row)
        if step % SPACING == 0:
            kept.append(rows.copy())
        w -= np.float32(LR) * rows.mean(axis=0)
    return np.stack(kept)


def compare(rows: NDArray[np.float32], ranks: int) -> dict[str, list[tuple[float, float]]]:
    """Return the matching rate and the length of each method's result for each vector of the first `ranks` ranks.

    The length is the two-norm of the result in units of the two-norm of the exact mean. Elements whose mean is 0 have
    no sign and are left out of the rate.
    """

    def rank(comm: Communicator) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for name, method in METHODS.items():
            aggregator: Any = method.start(comm, rows.shape[2])
            for of_ranks in rows:
                exact = of_ranks[:ranks].mean(axis=0, dtype=np.float64)
                result, signed = aggregator.aggregate(of_ranks[comm.rank].copy()), exact != 0
                length = float(np.linalg.norm(result.astype(np.float64)) / np.linalg.norm(exact))
                found.setdefault(name, []).append((matching_rate(result[signed], exact[signed]), length))
        return found

    return run_local(ranks, rank, "ring")[0]


def _claim(source: str, means: dict[str, NDArray[np.float64]]) -> Claim:
    at = [RANKS.index(3), RANKS.index(8)]
    here = "; ".join(f"{name} {rates[at[0]]:.1f} → {rates[at[1]]:.1f}" for name, rates in means.items())
    others = np.array([rates for name, rates in means.items() if name != "cascading"])
    return Claim(
        "Fig. 1b",
        f"{source}: cascading compression matches the fewest signs",
        "M = 3: around 56 %, the lowest",
        f"M = 3 → 8, %: {here}",
        bool((means["cascading"] < others.min(axis=0)).all()),
        "judged: the lowest for every M; "
        + (f"{GAUSSIAN_N:,} elements" if source == SOURCES[0] else f"a perceptron's gradients, {BATCH} images per rank")
        + f", {VECTORS} vectors; 56 % implies a normalisation that the paper does not state",
    )


def _lengths(source: str, means: dict[str, NDArray[np.float64]]) -> Claim:
    at = [RANKS.index(3), RANKS.index(8)]
    here = "; ".join(f"{name} {lengths[at[0]]:.2g} → {lengths[at[1]]:.2g}" for name, lengths in means.items())
    return Claim(
        "Fig. 1b",
        f"{source}: length of the results",
        "not shown",
        f"M = 3 → 8, in units of the exact mean's length: {here}",
        None,
        "the same vectors; Marsit's length is its global step's, here 1, and so is majority vote's",
    )
